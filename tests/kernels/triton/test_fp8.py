"""Products with weights of 8-bit floats against their twins: every kind of scale, few rows and more, sizes that no tile divides."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.fp8_matrix import FP8_EXACT_ROWS, Fp8Matrix
from octavo.kernels.kernel_shapes import Fp8Shape
from octavo.kernels.reference import fp8 as plain
from octavo.kernels.reference import layer
from octavo.kernels.triton import fp8
from octavo.kernels.triton.fp8 import Tiles, fp8_calls
from octavo.kernels.triton.gemv import products as gemv
from octavo.kernels.triton.gemv.tiles import ProductTiles

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}  # of the largest result
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16"])
SHAPES = {"rows": (150, 288, 288), "blocks": (256, 384, 128)}  # rows and columns of W, columns that share a scale
KINDS = pytest.mark.parametrize("kind", SHAPES)


def matrix(kind: str, device: str) -> Fp8Matrix:
    n, k, span = SHAPES[kind]
    dice = torch.Generator().manual_seed(n + k)
    values = torch.randn(n, k, generator=dice).clamp(-3, 3).to(torch.float8_e4m3fn)
    scale = torch.rand((n,) if kind == "rows" else (n // 128, k // 128), generator=dice) + 0.25
    return Fp8Matrix(values.to(device), scale.to(device), span)


def random(rows: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of very different size."""
    numbers = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))
    return (numbers * torch.linspace(0.1, 9, rows)[:, None]).to(device, dtype)


def assert_near(got: Tensor, exact: Tensor) -> None:
    assert got.dtype == exact.dtype
    torch.testing.assert_close(got, exact, atol=TOLERANCE[got.dtype] * float(exact.abs().max()), rtol=0)


@pytest.mark.parametrize("rows", [1, FP8_EXACT_ROWS, FP8_EXACT_ROWS + 3, 130])
@KINDS
@DTYPES
def test_products_of_every_kind_of_scale(dtype: torch.dtype, kind: str, rows: int, device: str) -> None:
    weight = matrix(kind, device)
    x, bias = random(rows, weight.shape[1], dtype, device), random(1, len(weight), dtype, device)[0]
    for offset in (None, bias):
        assert_near(fp8.fp8_linear(x, weight, offset), plain.fp8_linear(x, weight, offset))
    out = torch.empty(rows, len(weight), dtype=dtype, device=device)
    assert fp8.fp8_linear(x, weight, bias, out) is out
    assert_near(out, plain.fp8_linear(x, weight, bias))


@KINDS
def test_rounding_x_costs_what_8_bits_cost(kind: str, device: str) -> None:
    """Against the weights in full. e4m3 has steps of an eighth, so a number is off by a sixteenth at most."""
    weight = matrix(kind, device)
    x = random(FP8_EXACT_ROWS + 3, weight.shape[1], torch.bfloat16, device)
    got, exact = fp8.fp8_linear(x, weight).double(), x.double() @ plain.widen(weight).double().T
    assert 0.01 < (got - exact).norm() / exact.norm() < 0.035
    few = fp8.fp8_linear(x[:FP8_EXACT_ROWS], weight).double()
    assert (few - exact[:FP8_EXACT_ROWS]).norm() / exact[:FP8_EXACT_ROWS].norm() < 0.004


@KINDS
@DTYPES
def test_norms_in_front_and_gates_behind_one_row(dtype: torch.dtype, kind: str, device: str) -> None:
    weight = matrix(kind, device)
    (n, k), gates = weight.shape, len(weight) // 2
    x, scales, bias = random(1, k, dtype, device), random(1, k, dtype, device)[0], random(1, n, dtype, device)[0]
    given: Any = x, x.flip(1).contiguous(), scales, 1e-5, weight
    pairs = (gemv.norm_linear(*given, bias), layer.norm_linear(*given, bias)), (gemv.norm_gate_up(*given), layer.norm_gate_up(*given))
    for got, exact in pairs:
        assert_near(got[0], exact[0])
        assert torch.equal(got[1], exact[1])
    assert gemv.norm_gate_up(*given)[0].shape == (1, gates)


@pytest.mark.parametrize("span", [6144, 128])
def test_runs_of_a_row_that_are_all_filling_add_nothing(span: int, device: str) -> None:
    """A row is filled up to 8,192. Of each four runs that a thread takes of it, the last is not there."""
    values = torch.full((128, 6144), 0x38, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)  # ones
    weight = Fp8Matrix(values, torch.ones((128,) if span == 6144 else (1, 48), device=device), span)
    x = torch.ones(1, 6144, dtype=torch.bfloat16, device=device)
    assert torch.equal(gemv.linear(x, weight, tiles=ProductTiles(columns=1, warps=4)), torch.full_like(x[:, :128], 6144))


@KINDS
def test_programs_that_share_columns_add_up(kind: str, device: str) -> None:
    weight = matrix(kind, device)
    x, bias = random(20, weight.shape[1], torch.float32, device), random(1, len(weight), torch.float32, device)[0]
    got = fp8.by_tiles(x, None, weight, bias, x.dtype, Tiles(16, 64, shares=2, stages=2))
    assert_near(got, plain.fp8_linear(x, weight, bias))


@KINDS
def test_gpus_without_such_floats_widen_bytes(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are too small for a whole number before the point."""
    for module in (fp8, gemv):
        monkeypatch.setattr(module, "converts_fp8", lambda _: False)
    weight = matrix(kind, device)
    weight.values.view(torch.uint8)[:2, :128] = torch.arange(128, dtype=torch.uint8, device=device) % 127
    weight.values.view(torch.uint8)[2:4, :128] = torch.arange(128, dtype=torch.uint8, device=device) % 127 + 128
    for rows in (1, 12):
        x = random(rows, weight.shape[1], torch.float32, device)
        exact = x.double() @ plain.widen(weight).double().T
        assert_near(fp8.fp8_linear(x, weight), exact.float())
        rough = fp8.fp8_linear(x.bfloat16(), weight).double()  # x stays as it is, however many rows
        assert (rough - x.bfloat16().double() @ plain.widen(weight).double().T).norm() / exact.norm() < 0.004


@pytest.mark.parametrize("span", [384, 128])
def test_rows_are_rounded_as_the_twin_rounds_them(span: int, device: str) -> None:
    x = random(6, 384, torch.float32, device)
    x[2] = 0
    (values, scale), (exact, exact_scale) = fp8.round_rows(x, span), plain.round_rows(x, span)
    assert torch.equal(scale[:, :6].T, exact_scale) and torch.equal(values[:6].float(), exact.float())
    assert len(values) == 8 and not values[6:].float().any()  # filled up
    step = torch.maximum(exact.float().abs() / 16, torch.tensor(2.0**-10, device=device)) * exact_scale.repeat_interleave(span, 1)
    assert bool(((values[:6].float() * exact_scale.repeat_interleave(span, 1) - x).abs() <= step * 1.07).all())


def test_no_rows_are_no_work(device: str) -> None:
    assert fp8.fp8_linear(random(0, 288, torch.bfloat16, device), matrix("rows", device)).shape == (0, 150)


def test_every_variant_is_compiled_ahead_once(device: str) -> None:
    place = torch.device(device)
    one = fp8_calls([Fp8Shape(256, 384, 128)], torch.bfloat16, place)
    assert len(one) > 3 and len(fp8_calls([Fp8Shape(256, 384, 128)] * 3, torch.bfloat16, place)) == len(one)
    for call in one[:2]:
        call()
