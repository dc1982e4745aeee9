"""Products of a few rows with large weights, bound by reading the weights once; with what stands in front, in one kernel.

    linear         x W^T                                  head         rms_norm(x + residual) W^T, and the normed rows
    norm_linear    rms_norm(x + residual) W^T             merge_linear the splits of decode attention, merged, W^T
    gate_up        silu(gate) * up of that

    rows    1 to 4      all of it is one kernel (product_few, merge_few)
            5 to 16     add and norm are one, product and gate another (product_tile); merge_linear ends at 4

Weights are [out, in]; float32, float16 and bfloat16. More rows are a matter of matrix units, and of another kernel.
"""

import torch
import triton
from torch import Tensor

from octavo.kernels.triton.dependent import can_depend
from octavo.kernels.triton.few_tiles import FEW_ROWS, ProductTiles, merge_tiles, product_tiles
from octavo.kernels.triton.merge_few import merge_few, merge_heads
from octavo.kernels.triton.norm import add_rms_norm
from octavo.kernels.triton.product_few import product_few
from octavo.kernels.triton.product_tile import product_tile, sum_parts

MAX_ROWS = 16
MAX_HELD = 32768  # the longest row of W that `product_few` holds in registers
PROGRAMS = 264  # two for each multiprocessor
COLUMNS, DEPTH, STAGES = 32, 128, 4
SUM_TILE = 512

Norm = tuple[Tensor, Tensor, float]  # residual, weight, eps


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tiles: ProductTiles | None = None, dependent: bool = True) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]"""
    if _is_few(x):
        return _few(x, None, weight, bias, tiles, dependent)[0]
    return _tile(x, weight, bias)


def norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    tiles: ProductTiles | None = None,
    dependent: bool = True,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) W^T, the new residual)"""
    if _is_few(x):
        return _few(x, (residual, norm_weight, eps), weight, bias, tiles, dependent)
    x, stream = add_rms_norm(x, residual, norm_weight, eps)
    return _tile(x, weight, bias), stream


def head(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    tiles: ProductTiles | None = None,
    dependent: bool = True,
) -> tuple[Tensor, Tensor]:
    """(logits, the normed rows they were made of)"""
    if _is_few(x):
        return _few(x, (residual, norm_weight, eps), weight, None, tiles, dependent, keep_normed=True)
    hidden, _ = add_rms_norm(x, residual, norm_weight, eps)
    return _tile(hidden, weight), hidden


def gate_up(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    tiles: ProductTiles | None = None,
    dependent: bool = True,
) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up of rms_norm(x + residual), the new residual); weight [2 * size, in], gate over up"""
    if _is_few(x):
        return _few(x, (residual, norm_weight, eps), weight, None, tiles, dependent, gated=True)
    x, stream = add_rms_norm(x, residual, norm_weight, eps)
    return _tile(x, weight, gated=True), stream


def merge_linear(
    parts: Tensor,  # [rows, splits, heads, head_dim] float32
    parts_lse: Tensor,  # [rows, splits, heads], in units of log2; -inf: nothing, and the part is not read
    weight: Tensor,  # [out, heads * head_dim]
    bias: Tensor | None = None,
    tiles: ProductTiles | None = None,
    dependent: bool = True,
) -> Tensor:
    """The merged parts times W^T, [rows, out]"""
    rows, splits, heads, dim = parts.shape
    assert rows <= FEW_ROWS, f"{rows} rows, at most {FEW_ROWS}"
    assert parts.is_contiguous() and parts_lse.is_contiguous() and weight.is_contiguous() and weight.shape[1] == heads * dim
    heads_tile = triton.next_power_of_2(heads)
    chosen = tiles or merge_tiles(heads_tile * dim)
    out = torch.empty(rows, len(weight), dtype=weight.dtype, device=parts.device)
    dependent = dependent and can_depend()
    if rows:
        merge_few[(triton.cdiv(len(weight), chosen.columns),)](
            parts, parts_lse, weight, weight if bias is None else bias, out, rows,
            HEADS=heads, HEADS_TILE=heads_tile, DIM=dim, SPLITS=splits, OUT=len(weight), COLUMNS=chosen.columns,
            ROWS=triton.next_power_of_2(rows), BIASED=bias is not None, DEPENDENT=dependent,
            num_warps=chosen.warps, launch_pdl=dependent,
        )  # fmt: skip
    return out


def merge_parts(parts: Tensor, parts_lse: Tensor, dtype: torch.dtype, dependent: bool = True) -> Tensor:
    """The merged parts [rows, splits, heads, head_dim] as [rows, heads * head_dim]: in front of a product that does not merge"""
    rows, splits, heads, dim = parts.shape
    assert parts.is_contiguous() and parts_lse.is_contiguous()
    out = torch.empty(rows, heads * dim, dtype=dtype, device=parts.device)
    dependent = dependent and can_depend()
    if rows:
        merge_heads[(rows, heads)](
            parts, parts_lse, out, HEADS=heads, DIM=dim, SPLITS=splits, DEPENDENT=dependent, num_warps=1, launch_pdl=dependent
        )
    return out


def _is_few(x: Tensor) -> bool:
    return len(x) <= FEW_ROWS and x.shape[1] <= MAX_HELD


def _few(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    tiles: ProductTiles | None,
    dependent: bool,
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
    dependent = dependent and can_depend()
    if len(x):
        product_few[(triton.cdiv(wide, chosen.columns * chosen.turns),)](
            x, residual, norm_weight, stream, weight, weight if bias is None else bias, out, eps, len(x),
            SIZE=size, PADDED=padded, OUT=wide, COLUMNS=chosen.columns, ROWS=triton.next_power_of_2(len(x)),
            NORM=norm is not None, GATED=gated, BIASED=bias is not None, KEEP_NORMED=keep_normed, LOOPED=chosen.turns > 1,
            DEPENDENT=dependent, num_warps=chosen.warps, launch_pdl=dependent,
        )  # fmt: skip
    return out, stream


def _tile(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    size, wide = weight.shape[1], len(weight) // 2 if gated else len(weight)
    _check(x, weight)
    assert len(x) <= MAX_ROWS, f"{len(x)} rows, at most {MAX_ROWS}"
    programs = triton.cdiv(wide, COLUMNS)
    splits = 1
    while not gated and programs * splits < PROGRAMS and size >= 4 * DEPTH * splits:
        splits *= 2
    out = torch.empty(len(x), wide, dtype=x.dtype, device=x.device)
    parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
    offset = weight if bias is None else bias
    product_tile[(programs, splits)](
        x, weight, offset, out, parts, len(x),
        SIZE=size, OUT=wide, ROWS=MAX_ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH if x.element_size() == 2 else DEPTH // 2,
        SPLITS=splits, GATED=gated, BIASED=bias is not None, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        sum_parts[(triton.cdiv(out.numel(), SUM_TILE),)](
            parts, offset, out, out.numel(), OUT=wide, SPLITS=splits, BIASED=bias is not None, TILE=SUM_TILE, num_warps=4
        )
    return out


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype and x.shape[1] == weight.shape[1]
