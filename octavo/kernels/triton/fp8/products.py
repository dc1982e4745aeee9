"""Products with 8-bit float weights, by the number of rows: `fp8_linear`; and `round_rows`.

    rows    one           x is not rounded; a program holds some rows of W (`gemv/`)
            up to 8       x is not rounded, on the tensor cores (`fp8_tiles`)
            more          x is rounded to 8 bits, too: a scale for each row, or for each row and 128 columns if W has blocks
            many          the same with torch, whose product is then faster than ours

Before compute capability 8.9 no instruction multiplies 8-bit floats, and x is not rounded. x in float32 is never rounded.
"""

from typing import Literal

import torch
import triton
from torch import Tensor

from octavo.kernels.fp8_matrix import Fp8Matrix, rounds_x
from octavo.kernels.triton.fp8.round_rows import round_row
from octavo.kernels.triton.fp8.rules import Tiles, exact_tiles, is_for_torch, rounded_tiles
from octavo.kernels.triton.fp8.tiles import STEP, fp8_tiles
from octavo.kernels.triton.gemv.products import linear
from octavo.kernels.triton.gemv.tiles import FP8_GEMV_ROWS, MAX_HELD
from octavo.kernels.triton.packed.common import sum_shares
from octavo.kernels.triton.pdl import use_pdl
from octavo.kernels.triton.target import capability, converts_fp8

ALIGNED = 16  # columns and rows of W: required by torch's products
TALL = 4  # rows of x, and blocks of columns must be multiples of this, for the same reason
SUM_TILE = 512


def fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out], in `out` if given"""
    if out is not None:
        return out.copy_(fp8_linear(x, weight, bias))
    how = rule(len(x), weight, x.dtype)
    if how == "gemv":
        return linear(x, weight, bias)
    if not _is_rounded(len(x), x.dtype):
        assert how != "torch"
        return by_tiles(x, None, weight, bias, x.dtype, how)
    values, scale = round_rows(x, weight.span)
    if how == "torch":
        return by_torch(values, scale, weight, bias, len(x))
    return by_tiles(values[: len(x)], scale, weight, bias, x.dtype, how)


def rule(rows: int, weight: Fp8Matrix, dtype: torch.dtype) -> Literal["gemv", "torch"] | Tiles:
    """Returns the kernel for a product."""
    if rows <= FP8_GEMV_ROWS and weight.shape[1] <= MAX_HELD:
        return "gemv"
    if not _is_rounded(rows, dtype):
        return exact_tiles(rows, *weight.shape)
    wide, size = weight.shape
    fits = dtype == torch.bfloat16 and not wide % ALIGNED and not size % (TALL * weight.span if weight.blocks else ALIGNED)
    return "torch" if fits and is_for_torch(rows, *weight.shape, weight.blocks) else rounded_tiles(rows, *weight.shape)


def _is_rounded(rows: int, dtype: torch.dtype) -> bool:
    return rounds_x(rows, dtype) and converts_fp8(capability())


def variant(rows: int, weight: Fp8Matrix, dtype: torch.dtype, bias: bool) -> tuple[object, ...]:
    """Returns the parameters that the compiled kernels of this product depend on."""
    how, rounded = rule(rows, weight, dtype), (weight.shape[1], weight.span) if _is_rounded(rows, dtype) else ()
    if how == "gemv":
        return how, *weight.shape, weight.span, bias
    if how == "torch":
        return how, *rounded
    once = how._replace(shares=min(how.shares, 2))
    return *once, *rounded, weight.blocks, bias, _is_whole(weight, how), weight.shape[1] % ALIGNED, weight.shape[0] % ALIGNED


def round_rows(x: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """(8-bit floats [tall, in], their scales [in / span, tall] float32): rows are padded to multiples of TALL"""
    (rows, size), tall = x.shape, triton.cdiv(len(x), TALL) * TALL
    assert x.is_contiguous()
    values = torch.empty(tall, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(size // span, tall, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(size)
    if rows:
        round_row[(tall,)](
            x, values, scale, rows, tall, SIZE=size, PADDED=padded, SPAN=span, PDL=use_pdl(),
            num_warps=min(max(padded // 512, 1), 16), launch_pdl=use_pdl(),
        )  # fmt: skip
    return values, scale


def by_tiles(x: Tensor, x_scale: Tensor | None, weight: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype, how: Tiles) -> Tensor:
    """x: in 16 bits, or rounded and with scales; `dtype`: of the result"""
    wide, size = weight.shape
    assert x.is_contiguous() and x.shape[1] == size
    out = torch.empty(len(x), wide, dtype=dtype, device=x.device)
    if not len(x):
        return out
    parts = out if how.shares == 1 else torch.empty(how.shares, *out.shape, dtype=torch.float32, device=x.device)
    values = weight.values if converts_fp8(capability()) else weight.values.view(torch.uint8)
    fp8_tiles[(triton.cdiv(wide, how.columns), triton.cdiv(len(x), how.rows), how.shares)](
        x, weight.scale if x_scale is None else x_scale, values, weight.scale, out if bias is None else bias, out, parts, len(x),
        0 if x_scale is None else x_scale.shape[1], size, wide, triton.cdiv(triton.cdiv(size, STEP.value), how.shares),
        ROWS=how.rows, COLUMNS=how.columns, BLOCKS=weight.blocks, ROUNDED=x_scale is not None,
        WHOLE=_is_whole(weight, how), SHARED=how.shares > 1, BIAS=bias is not None, STAGES=how.stages,
        PDL=use_pdl(), num_warps=how.warps, launch_pdl=use_pdl(),
    )  # fmt: skip
    if how.shares > 1:
        sum_shares[(triton.cdiv(out.numel(), SUM_TILE),)](
            parts, out if bias is None else bias, out, 1.0, out.numel(), wide, how.shares, BIAS=bias is not None, TILE=SUM_TILE,
            num_warps=4,
        )  # fmt: skip
    return out


def by_torch(values: Tensor, scale: Tensor, weight: Fp8Matrix, bias: Tensor | None, rows: int) -> Tensor:
    """Returns the first `rows` of a product in bfloat16. values [tall, in], scale [1 or blocks, tall]: from `round_rows`"""
    if not weight.blocks:
        given = values[:rows], weight.values.t(), scale[0, :rows, None], weight.scale[None, :]
        return torch._scaled_mm(*given, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=False)
    recipes = torch.nn.functional.ScalingType
    product = torch.nn.functional.scaled_mm(
        values, weight.values.t(), scale.t(), recipes.BlockWise1x128, weight.scale.t(), recipes.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[:rows]  # fmt: skip
    return product if bias is None else product.add_(bias)


def _is_whole(weight: Fp8Matrix, how: Tiles) -> bool:
    """Whether steps and tiles divide the matrix."""
    return weight.shape[1] % STEP.value == 0 and len(weight) % how.columns == 0
