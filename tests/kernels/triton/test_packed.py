"""Products with packed codes against their twins: every path, width, group and way to divide the work, with sizes no tile divides."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes, block_size, zero_codes
from octavo.kernels.reference import layer as plain
from octavo.kernels.reference.dequant import FP4_MIDDLE, FP4_TABLE
from octavo.kernels.triton.packed import products as packed
from octavo.kernels.triton.packed.products import GEMM_ROWS, Gemm, Gemv, PackedShape, SmallGemm, packed_calls

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # of the largest result
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float16", "bfloat16"])
LONG = pytest.mark.soak  # in the interpreter; a GPU runs them all
KINDS = pytest.mark.parametrize(("bits", "group"), list(product((4, 8), (16, 32, 64, 128))), ids=str)


def codes(n: int, size: int, bits: int, group: int, device: str, order: bool = False) -> DeviceCodes:
    """Random ones. Behind the last row stand scales that are not numbers: a read past the end shows."""
    dice = torch.Generator().manual_seed(n + size + bits + group)
    columns = -(-size // block_size(bits, group)) * block_size(bits, group)
    words = torch.randint(-(2**15), 2**15, (n, columns * bits // 16), generator=dice, dtype=torch.int16)
    pairs = torch.randn(n + 2, -(-columns // group), 2, generator=dice).half()
    pairs[n:] = torch.nan
    pairs[:, -(-size // group) :] = 0
    scales = pairs.view(torch.int32).squeeze(-1).to(device)[:n]
    return DeviceCodes(
        bits, group, size, words.to(device), scales, 2.0 ** -(bits + 4), torch.randperm(size, generator=dice).to(device) if order else None
    )


def random(rows: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows + size)).to(device, dtype)


def poison(x: Tensor, weight: DeviceCodes) -> Tensor:
    return torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype, device=x.device)


def assert_near(got: Tensor, exact: Tensor, times: float = 1.0) -> None:
    assert got.dtype == exact.dtype and got.shape == exact.shape
    torch.testing.assert_close(got, exact, atol=times * TOLERANCE[got.dtype] * float(exact.abs().max()), rtol=0)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=LONG)], ids=str)
def test_unpacked_weights_are_those_of_the_twin_to_the_bit(dtype: torch.dtype, bits: int, group: int, device: str) -> None:
    for order in (False, True):
        weight = codes(19, 3 * group, bits, group, device, order)
        index = torch.tensor([18, 0, 7, 7], device=device)
        for rows in (None, index, index[:0]):
            assert torch.equal(packed.unpack(weight, dtype, rows), plain.unpack(weight, dtype, rows))


@KINDS
@pytest.mark.parametrize("rows", [1, 3, 18])
def test_products_of_every_kind_of_codes(rows: int, bits: int, group: int, device: str) -> None:
    weight, x = codes(37, 3 * group, bits, group, device, order=rows == 3), random(rows, 3 * group, torch.bfloat16, device)
    bias = random(1, 37, torch.bfloat16, device)[0]
    assert_near(packed.packed_linear(x, weight, bias), plain.packed_linear(x, weight, bias))


FEW = [SmallGemm(32, 1, 1), SmallGemm(32, 4, 1), SmallGemm(128, 8, 2), SmallGemm(32, 2, 3), SmallGemm(16, 1, 2)]
QUICK = {(0, torch.float32), (1, torch.bfloat16), (2, torch.float16), (2, torch.bfloat16), (3, torch.float32), (4, torch.bfloat16)}


@pytest.mark.parametrize(
    ("dtype", "how"),
    [pytest.param(dtype, how, marks=[] if (at, dtype) in QUICK else LONG) for dtype in TOLERANCE for at, how in enumerate(FEW)],
    ids=str,
)
def test_few_rows_however_the_work_is_divided(dtype: torch.dtype, how: SmallGemm, device: str) -> None:
    """Seven blocks: no number of stretches divides them."""
    weight = codes(21, 7 * 128, 4, 64, device)
    for rows in {1: (2, 16), 2: (8,), 4: (1, 4), 8: (1,)}[how.splits]:
        x, bias = random(rows, 7 * 128, dtype, device), random(1, 21, dtype, device)[0]
        assert_near(packed.small_gemm(x, weight, bias, poison(x, weight), how), plain.packed_linear(x, weight, bias))


ONE = [
    (Gemv(4, warps=1), 4, 32, 1024, torch.bfloat16),
    (Gemv(8, 2, 1, 1), 4, 128, 1024, torch.float32),
    (Gemv(8, ahead=1, warps=2), 8, 128, 1536, torch.float16),
    pytest.param(Gemv(4, ahead=3, warps=1), 4, 16, 2 * 512 + 64, torch.bfloat16, marks=LONG),
    pytest.param(Gemv(8, warps=1), 4, 64, 2 * 1024 + 64, torch.float16, marks=LONG),
    (Gemv(8, 2, 2, 2), 8, 16, 320, torch.float32),
]


@pytest.mark.parametrize(("how", "bits", "group", "size", "dtype"), ONE, ids=str)
def test_one_row_however_many_turns_and_steps(how: Gemv, bits: int, group: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Rows of W and steps that are not whole, orders, biases and gates."""
    x = random(1, size, dtype, device)
    weight, bias = codes(37, size, bits, group, device, order=bits == 8), random(1, 37, dtype, device)[0]
    assert_near(packed.gemv(x, weight, bias, poison(x, weight), how), plain.packed_linear(x, weight, bias), 2.0)
    weight = codes(42, size, bits, group, device, order=bits == 4)
    gated = packed.gemv(x, weight, None, poison(x, weight)[:, :21].contiguous(), how, "swiglu")
    assert_near(gated, plain.packed_gate_up(x, weight), 2.0)


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float32, Gemm(32, 128, warps=4)), (torch.float16, Gemm(16, 16, shares=3)), (torch.bfloat16, Gemm(32, 128, warps=4)),
        pytest.param(torch.float16, Gemm(32, 128, warps=4), marks=LONG), pytest.param(torch.float32, Gemm(16, 16, shares=3), marks=LONG),
        pytest.param(torch.bfloat16, Gemm(16, 16, shares=3), marks=LONG),
    ],
    ids=str,
)  # fmt: skip
def test_more_rows_however_the_work_is_divided(dtype: torch.dtype, how: Gemm, device: str) -> None:
    weight, x, bias = codes(21, 5 * 128, 4, 64, device), random(35, 5 * 128, dtype, device), random(1, 21, dtype, device)[0]
    assert_near(packed.gemm(x, weight, bias, poison(x, weight), how), plain.packed_linear(x, weight, bias))


@pytest.mark.parametrize("biased", [True, pytest.param(False, marks=LONG)])
def test_rows_by_the_hundred_multiply_slabs_of_weights(biased: bool, device: str) -> None:
    weight, x = codes(260, 64, 4, 32, device, order=True), random(GEMM_ROWS + 1, 64, torch.float32, device)
    bias = random(1, 260, torch.float32, device)[0] if biased else None
    out = poison(x, weight)
    assert packed.packed_linear(x, weight, bias, out) is out
    assert_near(out, plain.packed_linear(x, weight, bias))
    assert_near(packed.by_slabs(packed.in_order(x, weight), weight, bias, poison(x, weight), slab=1), out)


@pytest.mark.parametrize("rows", [1, 3, 18])
@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 32), (torch.bfloat16, 32), (torch.bfloat16, 128)], ids=str)
def test_codes_that_stand_for_what_a_table_has(dtype: torch.dtype, group: int, rows: int, device: str) -> None:
    dice = torch.Generator().manual_seed(group)
    table = torch.randint(0, 256, (16,), generator=dice, dtype=torch.uint8).to(device)
    weight = replace(codes(37, 3 * group, 4, group, device), factor=2.0**-12, table=table)
    x, bias = random(rows, 3 * group, dtype, device), random(1, 37, dtype, device)[0]
    assert_near(packed.packed_linear(x, weight, bias), plain.packed_linear(x, weight, bias), 2.0)
    assert torch.equal(packed.unpack(weight, dtype), plain.unpack(weight, dtype))


@pytest.mark.parametrize("rows", [1, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=LONG)], ids=str)
def test_floats_of_four_bits_are_what_their_table_says(dtype: torch.dtype, rows: int, device: str) -> None:
    dice = torch.Generator().manual_seed(1)
    weight = codes(37, 96, 4, 32, device)
    scale = torch.exp2(torch.randint(-3, 3, weight.scales.shape, generator=dice).float()).to(device)
    scale[:, 3:] = 0
    pairs = torch.stack([scale, scale * -FP4_MIDDLE], dim=-1).half().view(torch.int32).squeeze(-1)
    weight = replace(weight, scales=pairs, table=FP4_TABLE.to(device), floats=True)
    x, bias = random(rows, 96, dtype, device), random(1, 37, dtype, device)[0]
    assert_near(packed.packed_linear(x, weight, bias), plain.packed_linear(x, weight, bias), 2.0)
    assert torch.equal(packed.unpack(weight, dtype), plain.unpack(weight, dtype))


@pytest.mark.parametrize("rows", [1, 5, 17])
@DTYPES
def test_gate_behind(dtype: torch.dtype, rows: int, device: str) -> None:
    weight, x = codes(2 * 21, 96, 4, 32, device), random(rows, 96, dtype, device)
    for gate in ("swiglu", "geglu") if rows < 17 else ("clamped",):
        assert_near(packed.packed_gate_up(x, weight, gate), plain.packed_gate_up(x, weight, gate))


def test_no_rows_are_no_work(device: str) -> None:
    weight, x = codes(42, 96, 4, 32, device), random(0, 96, torch.float32, device)
    assert packed.packed_linear(x, weight).shape == (0, 42) and packed.packed_gate_up(x, weight).shape == (0, 21)


def test_every_number_of_rows_is_a_variant_that_is_compiled_ahead(device: str) -> None:
    shapes = [PackedShape(48, 128, 4, 32), PackedShape(48, 128, 8, 32, bias=True), PackedShape(96, 128, 4, 32, gated=True)]
    seen: set[tuple[object, ...]] = set()
    for shape in shapes:
        weight = zero_codes(shape.out_features, shape.in_features, shape.bits, shape.group, "meta")
        seen |= {packed.variant(rows, weight, shape.bias, shape.gated) for rows in range(1, 4 * GEMM_ROWS)}
    calls = packed_calls([*shapes, shapes[0]], torch.float32, torch.device(device))
    assert len(calls) == len(seen) > 10
    calls[0]()


def test_a_row_that_is_not_finite_disturbs_no_other(device: str) -> None:
    weight, x = codes(30, 512, 4, 32, device), random(4, 512, torch.bfloat16, device)
    before = packed.packed_linear(x, weight)
    x[1, 77] = torch.inf
    after = packed.packed_linear(x, weight)
    assert not after[1].isfinite().any() and torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
