"""Products of small batches with large weights, limited by reading the weights once; the preceding operations are fused.

    linear         x W^T                                      head          rms_norm(x + residual) W^T, and the normed rows
    norm_linear    rms_norm(x + residual) W^T                 norm_router   as norm_linear, and the normed rows
    norm_gate_up   silu(gate) * up of that, or other gates    merge_linear  the merged splits of decode attention, W^T

Each is one kernel (gemv, merge_gemv), for up to 4 rows. Weights are [out, in]; float32, float16, bfloat16, and (except for
merge_linear) 8-bit floats with scales. Larger batches use tensor cores, through torch.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from octavo.kernels.fp8_matrix import Fp8Matrix
from octavo.kernels.gates import GATES, Gate
from octavo.kernels.triton.gemv.gemv import gemv, merge_gemv, merge_heads
from octavo.kernels.triton.gemv.tiles import GEMV_ROWS, MAX_HELD, ProductTiles, fp8_row_tiles, merge_tiles, product_tiles
from octavo.kernels.triton.pdl import use_pdl
from octavo.kernels.triton.target import capability, converts_fp8

Weight = Tensor | Fp8Matrix


@dataclass(frozen=True, slots=True)
class Front:
    """The operations before a product: x, normed and scaled or not, is added to the residual stream, and the sum is normed or not."""

    residual: Tensor
    weight: Tensor | None  # of the norm
    eps: float
    after: Tensor | None = None  # of the norm of x
    scale: float = 1.0


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, tiles: ProductTiles | None = None, pdl: bool = True) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]"""
    return _gemv(x, None, weight, bias, tiles, pdl)[0]


def norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,  # None: the sum itself is multiplied
    eps: float,
    weight: Weight,
    bias: Tensor | None = None,
    after: Tensor | None = None,  # norm of x before it is added
    scale: float = 1.0,  # factor on x when it is added
    tiles: ProductTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) W^T, the new residual)"""
    product, stream, _ = _gemv(x, Front(residual, norm_weight, eps, after, scale), weight, bias, tiles, pdl)
    return product, stream


def norm_router(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,  # [experts, in]
    bias: Tensor | None = None,
    after: Tensor | None = None,
    scale: float = 1.0,
    tiles: ProductTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits of all experts, the normed rows they are computed from, the new residual), like `norm_linear`"""
    logits, stream, normed = _gemv(x, Front(residual, norm_weight, eps, after, scale), weight, bias, tiles, pdl, keep_normed=True)
    return logits, normed, stream


def head(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    tiles: ProductTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """(logits, the normed rows they are computed from)"""
    logits, _, normed = _gemv(x, Front(residual, norm_weight, eps), weight, None, tiles, pdl, keep_normed=True)
    return logits, normed


def norm_gate_up(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Weight,  # [2 * size, in], gate over up
    after: Tensor | None = None,
    scale: float = 1.0,
    gate: Gate = "swiglu",
    tiles: ProductTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """(the gated values of rms_norm(x + residual), the new residual), like `norm_linear`"""
    gated, stream, _ = _gemv(x, Front(residual, norm_weight, eps, after, scale), weight, None, tiles, pdl, gate)
    return gated, stream


def merge_linear(
    parts: Tensor,  # [rows, splits, heads, head_dim] float32
    parts_lse: Tensor,  # [rows, splits, heads], in units of log2; -inf: the part is empty and is not read
    weight: Tensor,  # [out, heads * head_dim]
    bias: Tensor | None = None,
    tiles: ProductTiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """The merged parts times W^T, [rows, out]"""
    rows, splits, heads, dim = parts.shape
    assert rows <= GEMV_ROWS, f"{rows} rows, at most {GEMV_ROWS}"
    assert parts.is_contiguous() and parts_lse.is_contiguous() and weight.is_contiguous() and weight.shape[1] == heads * dim
    heads_tile, dim_tile = triton.next_power_of_2(heads), triton.next_power_of_2(dim)
    chosen = tiles or merge_tiles(heads_tile * dim_tile, rows)
    out = torch.empty(rows, len(weight), dtype=weight.dtype, device=parts.device)
    pdl = pdl and use_pdl()
    if rows:
        merge_gemv[(triton.cdiv(len(weight), chosen.columns),)](
            parts, parts_lse, weight, weight if bias is None else bias, out, rows,
            HEADS=heads, HEADS_TILE=heads_tile, DIM=dim, DIM_TILE=dim_tile, SPLITS=splits, OUT=len(weight), COLUMNS=chosen.columns,
            ROWS=triton.next_power_of_2(rows), BIASED=bias is not None, PDL=pdl,
            num_warps=chosen.warps, launch_pdl=pdl,
        )  # fmt: skip
    return out


def merge_parts(parts: Tensor, parts_lse: Tensor, dtype: torch.dtype, pdl: bool = True) -> Tensor:
    """Merges parts [rows, splits, heads, head_dim] into [rows, heads * head_dim], before a product that does not merge."""
    rows, splits, heads, dim = parts.shape
    assert parts.is_contiguous() and parts_lse.is_contiguous()
    out = torch.empty(rows, heads * dim, dtype=dtype, device=parts.device)
    pdl = pdl and use_pdl()
    if rows:
        merge_heads[(rows, heads)](
            parts, parts_lse, out, HEADS=heads, DIM=dim, DIM_TILE=triton.next_power_of_2(dim), SPLITS=splits, PDL=pdl,
            num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out


def _gemv(
    x: Tensor,
    front: Front | None,
    weight: Weight,
    bias: Tensor | None,
    tiles: ProductTiles | None,
    pdl: bool,
    gate: Gate | None = None,
    keep_normed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(the product, the new residual, the normed rows if they are kept)"""
    gated = gate is not None
    size, wide = weight.shape[1], len(weight) // 2 if gated else len(weight)
    _check(x, weight)
    padded = triton.next_power_of_2(size)
    values, scale, span = _parts(weight)
    chosen = tiles or (fp8_row_tiles if span else product_tiles)(padded, wide, gated)
    out = torch.empty(len(x), wide, dtype=x.dtype, device=x.device)
    given = front or Front(x, None, 0.0)
    stream = torch.empty_like(x) if front else x
    normed = torch.empty_like(x) if keep_normed else x
    pdl = pdl and use_pdl()
    if len(x):
        gemv[(triton.cdiv(wide, chosen.columns * chosen.turns),)](
            x, given.residual, x if given.after is None else given.after, x if given.weight is None else given.weight, stream,
            normed, values, scale, x if bias is None else bias, out, given.eps, given.scale, len(x), size,
            SIZE=size, PADDED=padded, OUT=wide, COLUMNS=chosen.columns, ROWS=triton.next_power_of_2(len(x)),
            ADDED=front is not None, AFTER=given.after is not None, SCALED=given.scale != 1.0, NORM=given.weight is not None,
            GATED=gated, GATE=GATES.index(gate or "swiglu"), BIASED=bias is not None, KEEP_NORMED=keep_normed, LOOPED=chosen.turns > 1,
            SPAN=span, PDL=pdl, num_warps=chosen.warps, launch_pdl=pdl,
        )  # fmt: skip
    return out, stream, normed


def _parts(weight: Weight) -> tuple[Tensor, Tensor, int]:
    """The kernel's inputs: the elements, their scales, and the number of columns per scale."""
    if isinstance(weight, Tensor):
        return weight, weight, 0
    values = weight.values if converts_fp8(capability()) else weight.values.view(torch.uint8)
    return values, weight.scale, weight.span


def _check(x: Tensor, weight: Weight) -> None:
    assert len(x) <= GEMV_ROWS and x.shape[1] <= MAX_HELD, f"{len(x)} rows of {x.shape[1]}, at most {GEMV_ROWS} of {MAX_HELD}"
    assert x.is_contiguous() and x.shape[1] == weight.shape[1]
    assert isinstance(weight, Fp8Matrix) or (weight.is_contiguous() and x.dtype == weight.dtype)
