"""Products with packed codes, by the number of rows: `packed_linear`, `packed_gate_up`; and `unpack`.

    rows    small batch   codes are multiplied, scales are applied later (packed_small_gemm; packed_gemv for one row, without tensor cores)
            up to 512     codes are converted to weights in registers, tile by tile (packed_gemm)
            more          weights are unpacked once, in slabs of rows that fit into the L2 cache, for a product of floats

More than 512 rows share the unpacking of a slab, so that its cost is negligible, and torch's product is faster than ours.
The division of work depends on shape and GPU only, and is never tuned at run time: `bench/gpu_packed.py --sweep` tries
alternatives on a GPU and prints the best as lines for MEASURED.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes, zero_codes
from octavo.kernels.gates import GATES, Gate
from octavo.kernels.kernel_shapes import PackedShape
from octavo.kernels.triton.packed.codes import FLOATS, LOOKED_UP, sum_shares, unpack_tile
from octavo.kernels.triton.packed.gemm import packed_gemm, packed_small_gemm
from octavo.kernels.triton.packed.gemv import packed_gemv
from octavo.kernels.triton.pdl import use_pdl
from octavo.kernels.triton.step.elementwise import gate_and_mul
from octavo.kernels.triton.target import capability, is_roomy
from octavo.layout import SLAB

GEMV_STEPS = 12  # all steps are unrolled in the code
VOCABULARY = 100_000  # columns: such a wide matrix has enough programs that each may load two steps ahead
SMALL_GEMM_ROWS = 16
GEMM_ROWS = 512
PROGRAMS = 264  # two for each multiprocessor
SUM_TILE = 512
UNPACK_ROWS = 16

# -- how the work is divided


class SmallGemm(NamedTuple):
    """How `packed_small_gemm` divides its work."""

    lines: int = 64  # of a dot: columns times splits
    splits: int = 1
    shares: int = 1
    warps: int = 4
    stages: int = 4
    ahead: bool = True  # a program prefetches all its words into the L2 cache before it waits for the previous kernel


class Gemm(NamedTuple):
    """How `packed_gemm` divides its work."""

    rows: int
    columns: int = 128
    shares: int = 1
    warps: int = 8
    stages: int = 3


class Gemv(NamedTuple):
    """How `packed_gemv` divides its work: steps of 8 blocks for each warp."""

    columns: int  # processed at once
    turns: int = 1  # if a step is a whole row of W
    ahead: int = 2  # steps or turns whose words a program loads before it waits
    warps: int = 4


How = Gemv | SmallGemm | Gemm

SMALL_TILE = Gemm(rows=128, columns=64, warps=8)  # the largest for GPUs with little shared memory: compiled, never timed

# On an H200, 4 bits in groups of 128: (in, out) -> up to 1, 2, 4, ... 512 rows
MEASURED: dict[tuple[int, int], tuple[How, ...]] = {
    (4096, 6144): (
        SmallGemm(64, 8, 1, 2, 4, True), SmallGemm(128, 4, 2, 4, 4, False), SmallGemm(128, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 4, 4, 4, False), SmallGemm(64, 1, 4, 2, 4, False), Gemm(32, 64, 4, 4, 4), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(256, 128, 2, 8, 3), Gemm(256, 128, 1, 8, 3),
    ),
    (4096, 4096): (
        SmallGemm(128, 8, 2, 4, 4, False), SmallGemm(128, 4, 2, 4, 4, False), SmallGemm(128, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 4, 4, 4, False), SmallGemm(64, 1, 4, 2, 4, False), Gemm(32, 64, 4, 4, 4), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 2, 4, 3), Gemm(256, 128, 2, 8, 3),
    ),
    (4096, 24576): (
        SmallGemm(128, 8, 1, 4, 4, False), SmallGemm(128, 4, 1, 4, 4, False), SmallGemm(64, 2, 1, 4, 4, False),
        SmallGemm(64, 1, 1, 4, 4, True), Gemm(16, 64, 1, 4, 4), Gemm(32, 64, 1, 4, 4), Gemm(64, 64, 1, 4, 4), Gemm(128, 64, 1, 4, 3),
        Gemm(256, 128, 1, 8, 3), Gemm(256, 128, 1, 8, 3),
    ),
    (12288, 4096): (
        SmallGemm(128, 8, 2, 4, 4, False), SmallGemm(128, 4, 2, 4, 4, False), SmallGemm(128, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 8, 4, 4, False), SmallGemm(64, 1, 8, 2, 4, False), Gemm(32, 128, 8, 4, 3), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(256, 128, 4, 8, 3), Gemm(256, 128, 2, 8, 3),
    ),
    (1024, 4096): (
        SmallGemm(128, 4, 1, 4, 4, True), SmallGemm(128, 2, 1, 4, 4, True), SmallGemm(64, 2, 1, 2, 4, True),
        SmallGemm(64, 1, 4, 4, 4, False), SmallGemm(64, 1, 4, 2, 4, False), Gemm(32, 64, 1, 4, 4), Gemm(64, 64, 1, 4, 4),
        Gemm(128, 64, 1, 4, 3), Gemm(128, 64, 1, 4, 3), Gemm(128, 64, 1, 4, 3),
    ),
    (2048, 1024): (
        SmallGemm(128, 4, 1, 4, 4, True), SmallGemm(64, 4, 1, 2, 4, True), SmallGemm(64, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 8, 4, 4, False), SmallGemm(64, 1, 8, 2, 4, False), Gemm(32, 64, 4, 4, 4), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 4, 4, 3),
    ),
    (1024, 6144): (
        SmallGemm(128, 4, 1, 4, 4, True), SmallGemm(128, 4, 1, 4, 4, False), SmallGemm(64, 1, 1, 4, 4, True),
        SmallGemm(64, 1, 1, 4, 4, False), Gemm(16, 64, 1, 4, 4), Gemm(32, 64, 1, 4, 4), Gemm(64, 64, 1, 4, 4), Gemm(128, 64, 1, 4, 3),
        Gemm(128, 64, 1, 4, 3), Gemm(256, 128, 1, 8, 3),
    ),
    (3072, 1024): (
        SmallGemm(64, 8, 1, 2, 4, True), SmallGemm(64, 4, 1, 2, 4, True), SmallGemm(64, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 8, 4, 4, False), SmallGemm(64, 1, 8, 2, 4, False), Gemm(32, 64, 4, 4, 4), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 4, 4, 3),
    ),
}  # fmt: skip


def rule(rows: int, weight: DeviceCodes, gated: bool = False) -> How:
    """For 1 to 512 rows. A gated `packed_small_gemm` does not split the inner dimension, and codes with a table do not use it."""
    alone = gemv_rule(weight) if rows <= 1 else None
    if alone is not None:
        return alone
    measured = MEASURED.get((weight.size, len(weight)))
    if weight.table is not None:
        how: How = gemm_rule(rows, weight)
    elif measured is not None:
        how = measured[power_of_rows(rows).bit_length() - 1]
    else:
        how = small_gemm_rule(rows, weight) if rows <= SMALL_GEMM_ROWS else gemm_rule(rows, weight)
    if isinstance(how, Gemm):
        return how if is_roomy(capability()) else small(how)
    return how._replace(shares=1) if gated and isinstance(how, SmallGemm) else how


def power_of_rows(rows: int) -> int:
    held: int = triton.next_power_of_2(max(rows, 1))
    return held


def gemv_rule(weight: DeviceCodes) -> Gemv | None:
    """None if a row of W is too long."""
    needed = min(power_of_rows(-(-weight.blocks // 8)), 4)
    warps = next((warps for warps in (4, 2, 1) if weight.blocks % (8 * warps) == 0), needed)
    steps = gemv_steps(weight, warps)
    columns, ahead = 8 if len(weight) >= 4096 else 4, 2 if len(weight) >= VOCABULARY else 1
    return Gemv(columns, 1, min(steps, ahead), warps) if steps <= GEMV_STEPS else None


def gemv_steps(weight: DeviceCodes, warps: int) -> int:
    return -(-weight.blocks // (8 * warps))


def small_gemm_rule(rows: int, weight: DeviceCodes) -> SmallGemm:
    """Splits until the dot is full, then divides the inner dimension until there are enough programs.

    Dots of 16 columns use two warps: with four, Triton would select the asynchronous tensor core instructions, and wait for each of them.
    """
    held = power_of_rows(rows)
    how = SmallGemm(warps=4 if held <= 8 else 2)
    while how.splits * held < 8 and weight.blocks >= 4 * how.splits:
        how = how._replace(splits=2 * how.splits)
    while _programs(how, weight) < PROGRAMS and weight.blocks >= 4 * how.splits * how.shares:
        how = how._replace(shares=2 * how.shares)
    return how


def _programs(how: SmallGemm, weight: DeviceCodes) -> int:
    return len(weight) * how.splits // how.lines * how.shares


def gemm_rule(rows: int, weight: DeviceCodes) -> Gemm:
    """All rows in one tile up to 256, so that weights are converted once; splits the inner dimension if there are few tiles."""
    tall = min(max(power_of_rows(rows), 32), 256)
    tile = Gemm(tall) if tall > 64 else Gemm(tall, columns=64, warps=4)
    tiles, shares = triton.cdiv(rows, tall) * triton.cdiv(len(weight), tile.columns), 1
    while tiles * shares < PROGRAMS // 3 and weight.blocks >= 8 * shares:
        shares *= 2
    return tile._replace(shares=shares)


def small(tile: Gemm) -> Gemm:
    """The largest tile that fits into 99 KiB, and into registers on GPUs that read operands from there, for as many programs as before."""
    larger = tile.rows * tile.columns // (SMALL_TILE.rows * SMALL_TILE.columns)
    return tile if larger <= 1 else SMALL_TILE._replace(shares=max(tile.shares // larger, 1))


# -- the products


def packed_linear(x: Tensor, weight: DeviceCodes, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out], in `out` if given"""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device) if out is None else out
    assert out.is_contiguous() and out.dtype == x.dtype and out.shape == (len(x), len(weight))
    if len(x) > GEMM_ROWS:
        return by_slabs(in_order(x, weight), weight, bias, out)
    return divided(x, weight, bias, out, rule(len(x), weight))


def invariant_packed_linear(x: Tensor, weight: DeviceCodes, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Like `packed_linear`, with bits of a row that do not depend on the other rows: one kernel, which never splits the inner dimension."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device) if out is None else out
    how = gemm_rule(max(len(x), 1), weight)._replace(shares=1)
    return gemm(in_order(x, weight), weight, bias, out, how if is_roomy(capability()) else small(how)) if len(x) else out


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


# -- precompilation


def packed_calls(
    shapes: Iterable[PackedShape], dtype: torch.dtype, device: torch.device, gate: Gate = "swiglu"
) -> list[Callable[[], object]]:
    """Returns a call for each variant that the rules select, for any number of rows."""
    found: dict[tuple[object, ...], Callable[[], object]] = {}
    for shape in set(shapes):
        weight = _zeros(shape, "meta")
        for rows in range(1, GEMM_ROWS + 2):
            found.setdefault(variant(rows, weight, shape.bias, shape.gated), _call(shape, rows, dtype, device, gate))
    return list(found.values())


def _zeros(shape: PackedShape, device: torch.device | str) -> DeviceCodes:
    table = torch.zeros(16, dtype=torch.uint8, device=device) if shape.table else None
    return replace(zero_codes(shape.out_features, shape.in_features, shape.bits, shape.group, device), table=table, floats=shape.floats)


def _call(shape: PackedShape, rows: int, dtype: torch.dtype, device: torch.device, gate: Gate) -> Callable[[], object]:
    def call() -> None:
        weight = _zeros(shape, device)
        x = torch.zeros(rows, shape.in_features, dtype=dtype, device=device)
        bias = torch.zeros(shape.out_features, dtype=dtype, device=device) if shape.bias else None
        if shape.gated and bias is None:
            packed_gate_up(x, weight, gate)
        else:
            packed_linear(x, weight, bias)
        if rows > GEMM_ROWS:
            unpack(weight, dtype, torch.zeros(1, dtype=torch.int32, device=device))

    return call
