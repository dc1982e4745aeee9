"""Products with packed codes, by the number of rows: `packed_linear`, `packed_gate_up`; and `unpack`.

    rows    small batch   codes are multiplied, scales are applied later (packed_small_gemm; packed_gemv for one row, without tensor cores)
            up to 512     codes are converted to weights in registers, tile by tile (packed_gemm)
            more          weights are unpacked once, in slabs of rows that fit into the L2 cache, for a product of floats

More than 512 rows share the unpacking of a slab, so that its cost is negligible, and torch's product is faster than ours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.gates import GATES, Gate
from octavo.kernels.triton.packed.common import FLOATS, LOOKED_UP, sum_shares
from octavo.kernels.triton.packed.gemm import packed_gemm
from octavo.kernels.triton.packed.gemv import packed_gemv
from octavo.kernels.triton.packed.rules import GEMM_ROWS, SMALL_GEMM_ROWS, Gemm, Gemv, How, SmallGemm, gemv_steps, power_of_rows, rule
from octavo.kernels.triton.packed.small_gemm import packed_small_gemm
from octavo.kernels.triton.packed.unpack import unpack_tile
from octavo.kernels.triton.pdl import use_pdl
from octavo.kernels.triton.step.activation import gate_and_mul
from octavo.layout import SLAB

SUM_TILE = 512
UNPACK_ROWS = 16


def packed_linear(x: Tensor, weight: DeviceCodes, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out], in `out` if given"""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device) if out is None else out
    assert out.is_contiguous() and out.dtype == x.dtype and out.shape == (len(x), len(weight))
    if len(x) > GEMM_ROWS:
        return by_slabs(in_order(x, weight), weight, bias, out)
    return divided(x, weight, bias, out, rule(len(x), weight))


def packed_gate_up(x: Tensor, weight: DeviceCodes, gate: Gate = "swiglu") -> Tensor:
    """Returns the gated values; the weight has rows of gate over rows of up."""
    how = rule(len(x), weight, gated=True) if len(x) <= GEMM_ROWS else None
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    if isinstance(how, Gemv):
        return gemv(x, weight, None, out, how, gate)
    if isinstance(how, SmallGemm):
        return small_gemm(in_order(x, weight), weight, None, out, how, gate)
    return gate_and_mul(packed_linear(x, weight), gate)


def divided(x: Tensor, weight: DeviceCodes, bias: Tensor | None, out: Tensor, how: How) -> Tensor:
    if isinstance(how, Gemv):
        return gemv(x, weight, bias, out, how)
    x = in_order(x, weight)
    return small_gemm(x, weight, bias, out, how) if isinstance(how, SmallGemm) else gemm(x, weight, bias, out, how)


def unpack(weight: DeviceCodes, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """Returns all rows, or those of an index [count], dequantised [count, in]; columns in their original order."""
    count = len(weight) if rows is None else len(rows)
    out = _slab(weight, dtype, 0, count, rows)
    return out if weight.order is None else torch.empty_like(out).index_copy_(1, weight.order, out)


def variant(rows: int, weight: DeviceCodes, bias: bool, gated: bool) -> tuple[object, ...]:
    """Returns the parameters that a compiled kernel of this product depends on."""
    kind = *form_of(weight).values(), weight.words.device, bias
    if rows > GEMM_ROWS:
        return kind
    how = rule(rows, weight, gated)
    if isinstance(how, Gemv):
        return *kind, *how, gated, gemv_steps(weight, how.warps), _whole_turns(how, weight, gated)
    once = *kind, *how._replace(shares=min(how.shares, 2))
    if isinstance(how, SmallGemm):
        return *once, power_of_rows(rows), gated, _whole(how, weight, gated)
    return *once, len(weight) % how.columns == 0 and weight.size % weight.block == 0


def _whole(how: SmallGemm, weight: DeviceCodes, gated: bool) -> bool:
    """Whether programs and stretches divide the matrix."""
    columns = how.lines // how.splits
    wide, columns = (len(weight) // 2, columns // 2) if gated else (len(weight), columns)
    return wide % columns == 0 and weight.size % (weight.block * how.splits * how.shares) == 0


def _whole_turns(how: Gemv, weight: DeviceCodes, gated: bool) -> bool:
    """Whether programs and steps divide the matrix."""
    wide, columns = (len(weight) // 2, how.columns // 2) if gated else (len(weight), how.columns)
    return wide % (columns * how.turns) == 0 and weight.size % (weight.block * 8 * how.warps) == 0


def gemv(x: Tensor, weight: DeviceCodes, bias: Tensor | None, out: Tensor, how: Gemv, gate: Gate | None = None) -> Tensor:
    """For one row, or none."""
    gated = gate is not None
    wide, columns, steps = out.shape[1], how.columns // 2 if gated else how.columns, gemv_steps(weight, how.warps)
    assert len(x) <= 1 and x.is_contiguous() and x.shape[1] == weight.size
    if len(x):
        packed_gemv[(triton.cdiv(wide, columns * how.turns),)](
            x, weight.scales if weight.order is None else weight.order, weight.words.view(torch.uint32), weight.scales,
            table_of(weight), x if bias is None else bias, out, weight.factor, weight.size, wide,
            **form_of(weight), COLUMNS=how.columns, TURNS=how.turns, STEPS=steps, AHEAD=how.ahead,
            WHOLE=_whole_turns(how, weight, gated), ORDERED=weight.order is not None, BIAS=bias is not None,
            GATED=gated, GATE=GATES.index(gate or "swiglu"), WARPS=how.warps, PDL=use_pdl(), num_warps=how.warps, launch_pdl=use_pdl(),
        )  # fmt: skip
    return out


def small_gemm(x: Tensor, weight: DeviceCodes, bias: Tensor | None, out: Tensor, how: SmallGemm, gate: Gate | None = None) -> Tensor:
    gated = gate is not None
    rows, wide = power_of_rows(len(x)), out.shape[1]
    assert weight.table is None and rows * how.splits <= SMALL_GEMM_ROWS and how.lines % how.splits == 0 and not (gated and how.shares > 1)
    columns, stretches = how.lines // how.splits, how.splits * how.shares
    parts = _parts(out, how.shares)
    if len(x):
        packed_small_gemm[(triton.cdiv(wide, columns // 2 if gated else columns), how.shares)](
            x, weight.words, weight.scales, x if bias is None else bias, out, parts, weight.factor, len(x), weight.size, wide,
            triton.cdiv(weight.blocks, stretches),
            BITS=weight.bits, GROUP=weight.group, ROWS=rows, LANES=8 if rows * how.splits <= 8 else 16, COLUMNS=columns,
            SPLITS=how.splits, SHARED=how.shares > 1, WHOLE=_whole(how, weight, gated), BIAS=bias is not None, GATED=gated,
            GATE=GATES.index(gate or "swiglu"), WARPS=how.warps, STAGES=how.stages, AHEAD=how.ahead and use_pdl(), PDL=use_pdl(),
            num_warps=how.warps, launch_pdl=use_pdl(),
        )  # fmt: skip
    return _summed(out, parts, weight.factor, bias, how.shares)


def gemm(x: Tensor, weight: DeviceCodes, bias: Tensor | None, out: Tensor, how: Gemm) -> Tensor:
    parts = _parts(out, how.shares)
    whole = len(weight) % how.columns == 0 and weight.size % weight.block == 0
    packed_gemm[(triton.cdiv(len(x), how.rows), triton.cdiv(len(weight), how.columns), how.shares)](
        x, weight.words, weight.scales, table_of(weight), x if bias is None else bias, out, parts, weight.factor, len(x), weight.size,
        len(weight), triton.cdiv(weight.blocks, how.shares), **form_of(weight), ROWS=how.rows, COLUMNS=how.columns,
        SHARED=how.shares > 1, WHOLE=whole, BIAS=bias is not None, WARPS=how.warps, STAGES=how.stages, num_warps=how.warps,
    )  # fmt: skip
    return _summed(out, parts, 1.0, bias, how.shares)  # the weights already include their factor


def by_slabs(x: Tensor, weight: DeviceCodes, bias: Tensor | None, out: Tensor, slab: int = SLAB) -> Tensor:
    height = max(slab // weight.size // 256 * 256, 256)
    for first in range(0, len(weight), height):
        rows = slice(first, min(first + height, len(weight)))
        matrix = _slab(weight, x.dtype, first, rows.stop - first).t()
        if bias is None:
            torch.mm(x, matrix, out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, matrix, out=out[:, rows])
    return out


def table_of(weight: DeviceCodes) -> Tensor:
    return weight.scales if weight.table is None else weight.table


def form_of(weight: DeviceCodes) -> dict[str, int]:
    """Returns the compile-time parameters of the codes."""
    table = FLOATS if weight.floats else LOOKED_UP if weight.table is not None else tl.constexpr(0)
    return {"BITS": weight.bits, "GROUP": weight.group, "TABLE": table.value}


def in_order(x: Tensor, weight: DeviceCodes) -> Tensor:
    """Returns x with its columns in the order of the codes."""
    assert x.is_contiguous() and x.shape[1] == weight.size
    return x if weight.order is None else x.index_select(1, weight.order)


def _parts(out: Tensor, shares: int) -> Tensor:
    return out if shares == 1 else torch.empty(shares, *out.shape, dtype=torch.float32, device=out.device)


def _summed(out: Tensor, parts: Tensor, factor: float, bias: Tensor | None, shares: int) -> Tensor:
    if shares > 1 and out.numel():
        sum_shares[(triton.cdiv(out.numel(), SUM_TILE),)](
            parts, out if bias is None else bias, out, factor, out.numel(), out.shape[1], shares,
            BIAS=bias is not None, TILE=SUM_TILE, num_warps=4,
        )  # fmt: skip
    return out


def _slab(weight: DeviceCodes, dtype: torch.dtype, first: int, count: int, index: Tensor | None = None) -> Tensor:
    out = torch.empty(count, weight.size, dtype=dtype, device=weight.words.device)
    if count:
        unpack_tile[(triton.cdiv(count, UNPACK_ROWS), weight.blocks)](
            weight.words, weight.scales, table_of(weight), weight.scales if index is None else index, out, weight.factor, first, count,
            weight.size, **form_of(weight), ROWS=UNPACK_ROWS, BY_INDEX=index is not None, num_warps=4,
        )  # fmt: skip
    return out
