"""Products of a few rows with large weights, bound by reading the weights once: `linear`, `norm_linear`, `gate_up`.

    rows    1 to 4      add, norm, product and gate are one kernel (product_few)
            5 to 16     add and norm are one, product and gate another (product_tile)

Weights are [out, in]; float32, float16 and bfloat16. More rows are a matter of matrix units, and of another kernel.
"""

import torch
import triton
from torch import Tensor

from octavo.kernels.triton.norm import add_rms_norm
from octavo.kernels.triton.product_few import product_few
from octavo.kernels.triton.product_tile import product_tile, sum_parts

FEW_ROWS = 4
MAX_ROWS = 16
MAX_HELD = 16384  # the longest row of W that `product_few` holds in registers
PROGRAMS = 264  # two for each multiprocessor
COLUMNS, DEPTH, STAGES = 32, 128, 4
SUM_TILE = 512


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]"""
    if len(x) <= FEW_ROWS and x.shape[1] <= MAX_HELD:
        return _few(x, weight, None, gated=False)[0]
    return _tile(x, weight, gated=False)


def norm_linear(x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) W^T, the new residual)"""
    if len(x) <= FEW_ROWS and x.shape[1] <= MAX_HELD:
        return _few(x, weight, (residual, norm_weight, eps), gated=False)
    x, stream = add_rms_norm(x, residual, norm_weight, eps)
    return _tile(x, weight, gated=False), stream


def gate_up(x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up of rms_norm(x + residual), the new residual); weight [2 * size, in], gate over up"""
    if len(x) <= FEW_ROWS and x.shape[1] <= MAX_HELD:
        return _few(x, weight, (residual, norm_weight, eps), gated=True)
    x, stream = add_rms_norm(x, residual, norm_weight, eps)
    return _tile(x, weight, gated=True), stream


def _few(x: Tensor, weight: Tensor, norm: tuple[Tensor, Tensor, float] | None, gated: bool) -> tuple[Tensor, Tensor]:
    size, wide = weight.shape[1], len(weight) // 2 if gated else len(weight)
    _check(x, weight)
    padded = triton.next_power_of_2(size)
    columns = max(min((8192 if gated else 16384) // padded, 8), 1)
    out = torch.empty(len(x), wide, dtype=x.dtype, device=x.device)
    residual, norm_weight, eps = norm or (x, x, 0.0)
    stream = torch.empty_like(x) if norm else x
    if len(x):
        product_few[(triton.cdiv(wide, columns),)](
            x, residual, norm_weight, stream, weight, out, eps, len(x),
            SIZE=size, PADDED=padded, OUT=wide, COLUMNS=columns, NORM=norm is not None, GATED=gated,
            num_warps=4 if padded * columns <= 8192 else 8,
        )  # fmt: skip
    return out, stream


def _tile(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    size, wide = weight.shape[1], len(weight) // 2 if gated else len(weight)
    _check(x, weight)
    assert len(x) <= MAX_ROWS, f"{len(x)} rows, at most {MAX_ROWS}"
    programs = triton.cdiv(wide, COLUMNS)
    splits = 1
    while not gated and programs * splits < PROGRAMS and size >= 4 * DEPTH * splits:
        splits *= 2
    out = torch.empty(len(x), wide, dtype=x.dtype, device=x.device)
    parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
    product_tile[(programs, splits)](
        x, weight, out, parts, len(x),
        SIZE=size, OUT=wide, ROWS=MAX_ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH if x.element_size() == 2 else DEPTH // 2,
        SPLITS=splits, GATED=gated, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        sum_parts[(triton.cdiv(out.numel(), SUM_TILE),)](parts, out, out.numel(), SPLITS=splits, TILE=SUM_TILE, num_warps=4)
    return out


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype and x.shape[1] == weight.shape[1]
