"""Products of a few rows against their twins, with sizes no tile divides."""

from itertools import product

import pytest
import torch
from torch import Tensor

from octavo.kernels.gates import GATES, Gate
from octavo.kernels.reference import layer as plain
from octavo.kernels.triton.gemv import products
from octavo.kernels.triton.gemv.tiles import GEMV_ROWS, ProductTiles, product_tiles

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float16", "bfloat16"])
ROWS = pytest.mark.parametrize("rows", [1, GEMV_ROWS - 1, GEMV_ROWS])


def inputs(rows: int, size: int, wide: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + size)
    x, residual, scales, weight = (torch.randn(shape, generator=generator) for shape in ((rows, size), (rows, size), (size,), (wide, size)))
    guarded = torch.cat([weight * size**-0.5, torch.full((2, size), torch.nan)])  # a read past the end shows
    return x.to(device, dtype), residual.to(device, dtype), scales.to(device, dtype), guarded.to(device, dtype)[:wide]


def assert_near(got: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(got, exact, atol=TOLERANCE[got.dtype], rtol=TOLERANCE[got.dtype])


@ROWS
@DTYPES
def test_linear(dtype: torch.dtype, rows: int, device: str) -> None:
    for size, wide in ((72, 21), (1100, 37)):
        x, _, scales, weight = inputs(rows, size, wide, dtype, device)
        for bias in (None, scales[:wide].contiguous()):
            assert_near(products.linear(x, weight, bias), plain.linear(x, weight, bias))


@ROWS
@DTYPES
def test_norm_in_front_and_gate_behind(dtype: torch.dtype, rows: int, device: str) -> None:
    x, residual, scales, weight = inputs(rows, 200, 42, dtype, device)
    given, bias = (x, residual, scales, 1e-5, weight), scales[:42].contiguous()
    pairs = [(products.norm_linear(*given), plain.norm_linear(*given)), (products.norm_gate_up(*given), plain.norm_gate_up(*given))]
    pairs.append((products.norm_linear(*given, bias), plain.norm_linear(*given, bias)))
    for got, expected in pairs:
        assert_near(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("after", "before", "scale"), [(True, True, 1.0), (True, False, 1.0), (False, True, 0.22), (False, False, 1.0)], ids=str
)
def test_norms_after_and_before_scales_and_gates(after: bool, before: bool, scale: float, gate: Gate, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, residual, scales, weight = inputs(2, 200, 42, dtype, device)
        wide = scales.float() + 0.25  # a norm's weight may be float32
        given = (x, residual, wide if before else None, 1e-5, weight)
        asked = {"after": wide.flip(0).contiguous() if after else None, "scale": scale}
        for got, expected in (
            (products.norm_linear(*given, **asked), plain.norm_linear(*given, **asked)),
            (products.norm_gate_up(*given, **asked, gate=gate), plain.norm_gate_up(*given, **asked, gate=gate)),
        ):
            assert_near(got[0], expected[0])
            assert_near(got[1], expected[1])


@ROWS
@DTYPES
def test_head_leaves_logits_and_normed_rows(dtype: torch.dtype, rows: int, device: str) -> None:
    x, residual, scales, weight = inputs(rows, 72, 50, dtype, device)
    got, expected = products.head(x, residual, scales, 1e-5, weight), plain.head(x, residual, scales, 1e-5, weight)
    assert_near(got[0], expected[0])
    assert_near(got[1], expected[1])
    bias, after = scales[:50].contiguous(), scales.flip(0).contiguous()
    given = x, residual, scales, 1e-5, weight, bias, after, 0.5
    for one, other in zip(products.norm_router(*given), plain.norm_router(*given)):
        assert_near(one, other)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.soak), GEMV_ROWS])
def test_a_program_that_takes_turns_leaves_out_no_tile(rows: int, device: str) -> None:
    x, residual, scales, weight = inputs(rows, 72, 46, torch.float32, device)
    for turns in (2, 3, 64):  # 12 tiles over several programs, evenly and not, and over one
        tiles = ProductTiles(columns=4, warps=4, turns=turns)
        assert_near(products.linear(x, weight, scales[:46].contiguous(), tiles), plain.linear(x, weight, scales[:46]))
        got = products.norm_gate_up(x, residual, scales, 1e-5, weight, tiles=tiles)
        assert_near(got[0], plain.norm_gate_up(x, residual, scales, 1e-5, weight)[0])


def test_tiles_are_powers_of_two_for_every_size() -> None:
    """The compiler refuses others, which the interpreter runs."""
    for out, size, gated in product((1, 2, 64, 129, 256, 400, 640, 1000, 50257), (16, 1024, 4096, 1 << 15), (False, True)):
        tiles = product_tiles(size, out, gated)
        assert tiles.columns.bit_count() == tiles.warps.bit_count() == 1 and tiles.turns >= 1, (out, size, gated, tiles)


def test_more_rows_are_refused(device: str) -> None:
    x, _, _, weight = inputs(GEMV_ROWS + 1, 16, 16, torch.float32, device)
    with pytest.raises(AssertionError, match="5 rows of 16, at most 4 of 32768"):
        products.linear(x, weight)
