"""Products of a few rows with large weights, bound by reading the weights once; with what stands in front, in one kernel.

    linear         x W^T                                  head         rms_norm(x + residual) W^T, and the normed rows
    norm_linear    rms_norm(x + residual) W^T             merge_linear the splits of decode attention, merged, W^T
    gate_up        silu(gate) * up of that

Each is one kernel (gemv, merge_gemv), for up to 4 rows. Weights are [out, in]; float32, float16 and bfloat16. More rows are a
matter of matrix units, and of torch.
"""

import torch
import triton
from torch import Tensor

from octavo.kernels.triton.gemv.gemv import gemv
from octavo.kernels.triton.gemv.merge import merge_gemv, merge_heads
from octavo.kernels.triton.gemv.tiles import GEMV_ROWS, MAX_HELD, ProductTiles, merge_tiles, product_tiles
from octavo.kernels.triton.pdl import use_pdl

Norm = tuple[Tensor, Tensor, float]  # residual, weight, eps


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tiles: ProductTiles | None = None, pdl: bool = True) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]"""
    return _gemv(x, None, weight, bias, tiles, pdl)[0]


def norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    tiles: ProductTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) W^T, the new residual)"""
    return _gemv(x, (residual, norm_weight, eps), weight, bias, tiles, pdl)


def head(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    tiles: ProductTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """(logits, the normed rows they were made of)"""
    return _gemv(x, (residual, norm_weight, eps), weight, None, tiles, pdl, keep_normed=True)


def gate_up(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    tiles: ProductTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up of rms_norm(x + residual), the new residual); weight [2 * size, in], gate over up"""
    return _gemv(x, (residual, norm_weight, eps), weight, None, tiles, pdl, gated=True)


def merge_linear(
    parts: Tensor,  # [rows, splits, heads, head_dim] float32
    parts_lse: Tensor,  # [rows, splits, heads], in units of log2; -inf: nothing, and the part is not read
    weight: Tensor,  # [out, heads * head_dim]
    bias: Tensor | None = None,
    tiles: ProductTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """The merged parts times W^T, [rows, out]"""
    rows, splits, heads, dim = parts.shape
    assert rows <= GEMV_ROWS, f"{rows} rows, at most {GEMV_ROWS}"
    assert parts.is_contiguous() and parts_lse.is_contiguous() and weight.is_contiguous() and weight.shape[1] == heads * dim
    heads_tile = triton.next_power_of_2(heads)
    chosen = tiles or merge_tiles(heads_tile * dim)
    out = torch.empty(rows, len(weight), dtype=weight.dtype, device=parts.device)
    pdl = pdl and use_pdl()
    if rows:
        merge_gemv[(triton.cdiv(len(weight), chosen.columns),)](
            parts, parts_lse, weight, weight if bias is None else bias, out, rows,
            HEADS=heads, HEADS_TILE=heads_tile, DIM=dim, SPLITS=splits, OUT=len(weight), COLUMNS=chosen.columns,
            ROWS=triton.next_power_of_2(rows), BIASED=bias is not None, PDL=pdl,
            num_warps=chosen.warps, launch_pdl=pdl,
        )  # fmt: skip
    return out


def merge_parts(parts: Tensor, parts_lse: Tensor, dtype: torch.dtype, pdl: bool = True) -> Tensor:
    """The merged parts [rows, splits, heads, head_dim] as [rows, heads * head_dim]: in front of a product that does not merge"""
    rows, splits, heads, dim = parts.shape
    assert parts.is_contiguous() and parts_lse.is_contiguous()
    out = torch.empty(rows, heads * dim, dtype=dtype, device=parts.device)
    pdl = pdl and use_pdl()
    if rows:
        merge_heads[(rows, heads)](
            parts, parts_lse, out, HEADS=heads, DIM=dim, SPLITS=splits, PDL=pdl, num_warps=1, launch_pdl=pdl
        )
    return out


def _gemv(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    tiles: ProductTiles | None,
    pdl: bool,
    gated: bool = False,
    keep_normed: bool = False,
) -> tuple[Tensor, Tensor]:
    size, wide = weight.shape[1], len(weight) // 2 if gated else len(weight)
    _check(x, weight)
    padded = triton.next_power_of_2(size)
    chosen = tiles or product_tiles(padded, wide, gated)
    out = torch.empty(len(x), wide, dtype=x.dtype, device=x.device)
    residual, norm_weight, eps = norm or (x, x, 0.0)
    stream = torch.empty_like(x) if norm else x
    pdl = pdl and use_pdl()
    if len(x):
        gemv[(triton.cdiv(wide, chosen.columns * chosen.turns),)](
            x, residual, norm_weight, stream, weight, weight if bias is None else bias, out, eps, len(x),
            SIZE=size, PADDED=padded, OUT=wide, COLUMNS=chosen.columns, ROWS=triton.next_power_of_2(len(x)),
            NORM=norm is not None, GATED=gated, BIASED=bias is not None, KEEP_NORMED=keep_normed, LOOPED=chosen.turns > 1,
            PDL=pdl, num_warps=chosen.warps, launch_pdl=pdl,
        )  # fmt: skip
    return out, stream


def _check(x: Tensor, weight: Tensor) -> None:
    assert len(x) <= GEMV_ROWS and x.shape[1] <= MAX_HELD, f"{len(x)} rows of {x.shape[1]}, at most {GEMV_ROWS} of {MAX_HELD}"
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype and x.shape[1] == weight.shape[1]
