"""An MoE layer for larger batches: tiles of rows for one expert, times tiles of its matrix (`route.py` sorts rows by expert).

    W   [COLUMNS, STEP]   the left side of tl.dot, so that small tiles use the tensor cores fully, whose left side has at least 64 lines
    x   [ROWS, STEP]      the right side: rows of tokens by index, or rows that the previous product stored in sorted order

If GATED, W is gate over up: rows of x are loaded by token, and gated values are stored in the order of the tiles. Otherwise rows are
read in that order, and each result is stored in the line of its choice, for `sum_choices`.

If DIRECT (`direct.py`), a tile has one row, that of a choice, and all lines are those of choices.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.gates import GATES, Gate
from octavo.kernels.triton.moe.route import Choices, Sorted, Stack
from octavo.kernels.triton.packed.codes import MAX_SPAN, WORD_BITS, ask_for, scale_and_offset, weights
from octavo.kernels.triton.packed.gemm import gathered, side_by_side, spread
from octavo.kernels.triton.packed.products import form_of, in_order, table_of
from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.elementwise import gate_and_mul, gated
from octavo.kernels.triton.target import capability, is_roomy

SUM_TILE = 1024

# -- how the work is divided
#
# With 256 tokens, 8 of 128 experts each, an expert has 16 rows: reading matrices is the bottleneck, so a tile should hold all of them.


class Grouped(NamedTuple):
    rows: int
    columns: int
    step: int
    warps: int
    stages: int


def grouped_tiles(choices: int, count: int, dtype: torch.dtype, gated: bool) -> Grouped:
    """For floats. A tile has as many rows as fit and as an expert has on average, with some spare."""
    rows = grouped_rows(choices, count)
    if dtype == torch.float32:
        return Grouped(min(rows, 32), 32, 32, 4, 2)
    if not is_roomy(capability()):
        return Grouped(min(rows, 64), 64, 32, 4, 3)
    if rows <= 64:
        return Grouped(rows, 64 if gated else 128, 64, 4, 4)
    return Grouped(rows, 128, 64, 8, 3 if gated else 4)


def packed_grouped_tiles(choices: int, count: int, dtype: torch.dtype) -> Grouped:
    """For codes; a step is a block."""
    rows = grouped_rows(choices, count)
    if dtype == torch.float32:
        return Grouped(min(rows, 32), 32, 0, 4, 2)
    if not is_roomy(capability()):
        return Grouped(min(rows, 64), 64, 0, 8, 2)
    return Grouped(rows, 64, 0, 4, 3) if rows <= 64 else Grouped(rows, 128, 0, 8, 3)


def segments_of(stack: DeviceCodes) -> int:
    """Returns the parts of the columns that are summed apart with `deterministic`: they fill a GPU when there is one row."""
    return 4 if stack.blocks >= 16 else 2 if stack.blocks >= 8 else 1


def grouped_rows(choices: int, count: int) -> int:
    """The rows of a tile, a power of two: it depends on the shape of a step, not on its choices."""
    rows: int = triton.next_power_of_2(-(-3 * choices // (2 * count)))
    return min(max(rows, 16), 128)


# -- floats


@triton.jit
def ask_for_rows(weight, expert, COLUMNS: tl.constexpr, WIDE: tl.constexpr, BYTES: tl.constexpr):
    """Prefetches a program's rows of an expert's matrix. There must be an expert, or any row is prefetched."""
    column = tl.minimum(tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), WIDE - 1)
    line = tl.maximum(expert, 0) * WIDE + column
    if BYTES % 16 == 0:
        ask_for(weight + line * (BYTES // (weight.dtype.element_ty.primitive_bitwidth // 8)), tl.zeros([COLUMNS], tl.int32) + BYTES)


@triton.jit
def load_step(line, start, k, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Loads columns of lines from `start` on, zero after SIZE."""
    return tl.load(line + start) if SIZE % STEP == 0 else tl.load(line + start, mask=start + k < SIZE, other=0.0)


@triton.jit
def choices_of(order, tile, choices, CHOSEN: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, DIRECT: tl.constexpr):
    """(which rows of a tile are valid, their lines in x, and in the result). Padding reads any line."""
    row = tl.arange(0, ROWS)
    if DIRECT:
        return row == 0, tl.zeros([ROWS], tl.int32) + (tile // CHOSEN if GATED else tile), tile + row
    else:
        place = tile * ROWS + row
        choice = tl.load(order + place)
        there = choice < choices
        return there, tl.where(there, choice // CHOSEN, 0) if GATED else place, place if GATED else choice


@triton.jit
def expert_of(experts, count, tile, first, COUNT: tl.constexpr, DIRECT: tl.constexpr):
    """The number in the stack of a tile's expert, below 0 if there is none. If DIRECT, `experts` has the choices of tokens."""
    if DIRECT:
        expert = tl.load(experts + tile).to(tl.int64) - first
        return tl.where(expert < COUNT, expert, -1)
    else:
        return tl.load(experts + tile, mask=tile < tl.load(count), other=-1).to(tl.int64)


@triton.jit(do_not_specialize=["choices", "first"])
def multiply_tiles(
    x,
    order,
    experts,
    count,
    weight,
    bias,
    out,
    choices,
    first,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out: GATED and not DIRECT [tiles * ROWS, WIDE], else [choices, WIDE]"""
    if not DIRECT or not GATED:
        begin(PDL)
    tile = tl.program_id(1)
    kind = out.dtype.element_ty
    HEIGHT: tl.constexpr = 2 * WIDE if GATED else WIDE  # rows of an expert's matrix
    if DIRECT and not GATED and PDL:
        ask_for_rows(weight, expert_of(experts, count, tile, first, COUNT, True), COLUMNS, WIDE, SIZE * 2)
    wait(PDL)
    if DIRECT and GATED:  # so the next product may read the choices before its own wait
        begin(PDL)
    expert = expert_of(experts, count, tile, first, COUNT, DIRECT)
    if expert < 0:
        return
    there, line, target = choices_of(order, tile, choices, CHOSEN, ROWS, GATED, DIRECT)
    column, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)[None, :]
    inside = column < WIDE
    line_of_x = x + line.to(tl.int64)[:, None] * SIZE + k
    line_of_w = weight + (expert * HEIGHT + tl.minimum(column, WIDE - 1))[:, None] * SIZE + k
    total, second = tl.zeros([COLUMNS, ROWS], tl.float32), tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in tl.range(0, SIZE, STEP, num_stages=STAGES):
        rows = tl.trans(load_step(line_of_x, start, k, SIZE, STEP))
        total = tl.dot(load_step(line_of_w, start, k, SIZE, STEP), rows, total, input_precision="ieee")
        if GATED:
            second = tl.dot(load_step(line_of_w + WIDE * SIZE, start, k, SIZE, STEP), rows, second, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + expert * HEIGHT + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIASED:
            second += tl.load(bias + expert * HEIGHT + WIDE + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        result = gated(total.to(kind).to(tl.float32), second.to(kind).to(tl.float32), kind, GATE)
    else:
        result = total.to(kind)
    target = target.to(tl.int64)
    tl.store(out + target[:, None] * WIDE + column[None, :], tl.trans(result), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first"])
def sum_choices(
    parts,
    ids,
    weights,
    out,
    first,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """parts [choices, HIDDEN] -> out [T, HIDDEN], weighted; experts that are not in the stack add nothing"""
    begin(PDL)
    token, column = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    wait(PDL)
    for index in tl.static_range(CHOSEN):
        choice = token * CHOSEN + index
        expert = tl.load(ids + choice) - first
        wanted = (column < HIDDEN) & (expert >= 0) & (expert < COUNT)
        part = tl.load(parts + choice.to(tl.int64) * HIDDEN + column, mask=wanted, other=0.0).to(tl.float32)
        total = tl.fma(part, tl.load(weights + choice), total)
    tl.store(out + token.to(tl.int64) * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)


# -- packed codes: they are converted as in `packed/gemm.py`
#
# The gate is a separate kernel here: gate and up are stored next to each other, in the order of the tiles. With SEGMENTS, a sum is that of
# the sums of as many parts of the columns, in their order. If DIRECT, each of them has a program of its own.


@triton.jit(do_not_specialize=["choices", "first"])
def multiply_tiles_of_codes(
    x,
    order,
    experts,
    count,
    words,
    scales,
    table,
    bias,
    out,
    factor,
    choices,
    first,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PICKED: tl.constexpr,
    BIASED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DIRECT: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """PICKED: x [T, SIZE] -> out [tiles * ROWS, WIDE], else x [tiles * ROWS, SIZE] -> out [choices, WIDE]

    DIRECT: x [T, SIZE] or [choices, SIZE] -> out [SEGMENTS, choices, WIDE] float32, without the bias
    """
    PER_WORD: tl.constexpr = WORD_BITS // BITS
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = PER_WORD * SPAN
    RUN: tl.constexpr = min(GROUP // SPAN, PER_WORD)
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    GROUPS: tl.constexpr = (BLOCKS * BLOCK + GROUP - 1) // GROUP

    PER_SEGMENT: tl.constexpr = (BLOCKS + SEGMENTS - 1) // SEGMENTS

    if not DIRECT or not PICKED:
        begin(PDL)
    tile, segment = tl.program_id(1), tl.program_id(2)
    kind = x.dtype.element_ty
    if DIRECT and not PICKED and PDL:  # noqa: SIM102 (compile-time constants, unlike the segment)
        if segment == 0:
            ask_for_rows(words, expert_of(experts, count, tile, first, COUNT, True), COLUMNS, WIDE, BLOCKS * SPAN * 2)
    wait(PDL)
    if DIRECT and PICKED:  # so the next product may read the choices before its own wait
        begin(PDL)
    expert = expert_of(experts, count, tile, first, COUNT, DIRECT)
    if expert < 0:
        return
    there, line, target = choices_of(order, tile, choices, CHOSEN, ROWS, PICKED, DIRECT)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDE
    loaded = tl.minimum(tl.program_id(0) * COLUMNS + spread(COLUMNS, WARPS), WIDE - 1)[:, :, None]
    line_of_words = words + (expert * WIDE + loaded) * (BLOCKS * SPAN) + tl.arange(0, SPAN)[None, None, :]
    line_of_scales = scales + (expert * WIDE + tl.minimum(column, WIDE - 1)) * GROUPS
    within = tl.arange(0, BLOCK)[None, :]
    line_of_x = x + line.to(tl.int64)[:, None] * SIZE + within
    total, before = tl.zeros([COLUMNS, ROWS], tl.float32), tl.zeros([COLUMNS, ROWS], tl.float32)
    low, high = 0, BLOCKS
    if DIRECT:
        low, high = segment * PER_SEGMENT, tl.minimum((segment + 1) * PER_SEGMENT, BLOCKS)
    for block in tl.range(low, high, num_stages=STAGES):
        if SEGMENTS > 1 and not DIRECT:  # noqa: SIM102 (compile-time constants, unlike the block)
            if block // PER_SEGMENT * PER_SEGMENT == block:
                before += total
                total = tl.zeros([COLUMNS, ROWS], tl.float32)
        codes = gathered(tl.load(line_of_words + block * SPAN), COLUMNS, WARPS, False)
        spans = ()
        for run in tl.static_range(PER_WORD // RUN):
            scale, offset = scale_and_offset(tl.load(line_of_scales + (block * BLOCK + run * RUN * SPAN) // GROUP))
            for index in tl.static_range(run * RUN, run * RUN + RUN):
                made = weights(codes, table, scale * factor, offset * factor, index, BITS, TABLE, kind)
                spans = spans + (made,)  # type: ignore[assignment]
        if BLOCKS * BLOCK == SIZE:
            rows = tl.load(line_of_x + block * BLOCK)
        else:
            rows = tl.load(line_of_x + block * BLOCK, mask=block * BLOCK + within < SIZE, other=0.0)
        total = tl.dot(side_by_side(spans), tl.trans(rows), total, input_precision="ieee")
    if SEGMENTS > 1 and not DIRECT:
        total = before + total
    if BIASED:
        total += tl.load(bias + expert * WIDE + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = target.to(tl.int64) + (segment * choices if DIRECT else 0)
    result = tl.trans(total.to(out.dtype.element_ty))
    tl.store(out + target[:, None] * WIDE + column[None, :], result, mask=there[:, None] & inside[None, :])


# -- launches


def many_gate_up(
    x: Tensor, choices: Choices, lined_up: Sorted, stack: Stack, bias: Tensor | None, gate: Gate, segmented: bool = False
) -> Tensor:
    """[tiles * rows, inner], in the order of the tiles. `segmented`: with the segments of `deterministic`"""
    inner = len(stack) // choices.count // 2
    height = lined_up.tiles * lined_up.rows
    if isinstance(stack, Tensor):
        out = torch.empty(height, inner, dtype=x.dtype, device=x.device)
        _multiply(x, choices, lined_up, stack, bias, out, gate)
        return out
    both = torch.empty(height, 2 * inner, dtype=x.dtype, device=x.device)
    _multiply_codes(in_order(x, stack), choices, lined_up, stack, bias, both, True, segments_of(stack) if segmented else 1)
    return gate_and_mul(both, gate)


def many_down(
    x: Tensor, choices: Choices, lined_up: Sorted, stack: Stack, bias: Tensor | None, hidden: int, segmented: bool = False
) -> Tensor:
    """x [tiles * rows, inner] -> [T, hidden]"""
    parts = torch.empty(choices.ids.numel(), hidden, dtype=x.dtype, device=x.device)
    if isinstance(stack, Tensor):
        _multiply(x, choices, lined_up, stack, bias, parts, None)
    else:
        _multiply_codes(in_order(x, stack), choices, lined_up, stack, bias, parts, False, segments_of(stack) if segmented else 1)
    return weighted_sum(parts, choices, x.dtype)


def weighted_sum(parts: Tensor, choices: Choices, dtype: torch.dtype) -> Tensor:
    """parts [choices, hidden] -> [T, hidden]"""
    hidden = parts.shape[1]
    out = torch.empty(len(choices.ids), hidden, dtype=dtype, device=parts.device)
    sum_choices[(len(out), triton.cdiv(hidden, SUM_TILE))](
        parts, choices.ids, choices.weights, out, choices.first, COUNT=choices.count, CHOSEN=choices.chosen, HIDDEN=hidden,
        TILE=SUM_TILE, PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
    )  # fmt: skip
    return out


def _multiply(
    x: Tensor, choices: Choices, lined_up: Sorted, stack: Tensor, bias: Tensor | None, out: Tensor, gate: Gate | None
) -> None:
    number, gated, wide = choices.ids.numel(), gate is not None, out.shape[1]
    tiles = grouped_tiles(number, choices.count, x.dtype, gated)
    multiply_tiles[(triton.cdiv(wide, tiles.columns), lined_up.tiles)](
        x, lined_up.order, lined_up.experts, lined_up.count, stack, stack if bias is None else bias, out, number, choices.first,
        COUNT=choices.count, CHOSEN=choices.chosen, SIZE=stack.shape[1], WIDE=wide, ROWS=lined_up.rows, COLUMNS=tiles.columns,
        STEP=tiles.step, STAGES=tiles.stages, GATED=gated, GATE=GATES.index(gate or "swiglu"), BIASED=bias is not None, DIRECT=False,
        PDL=use_pdl(), num_warps=tiles.warps, launch_pdl=use_pdl(),
    )  # fmt: skip


def _multiply_codes(
    x: Tensor, choices: Choices, lined_up: Sorted, stack: DeviceCodes, bias: Tensor | None, out: Tensor, picked: bool, segments: int
) -> None:
    number, wide = choices.ids.numel(), out.shape[1]
    tiles = packed_grouped_tiles(number, choices.count, x.dtype)
    multiply_tiles_of_codes[(triton.cdiv(wide, tiles.columns), lined_up.tiles)](
        x, lined_up.order, lined_up.experts, lined_up.count, stack.words, stack.scales, table_of(stack), x if bias is None else bias, out,
        stack.factor, number, choices.first, COUNT=choices.count, CHOSEN=choices.chosen, SIZE=stack.size, WIDE=wide, **form_of(stack),
        ROWS=lined_up.rows,
        COLUMNS=tiles.columns, STAGES=tiles.stages, PICKED=picked, BIASED=bias is not None, SEGMENTS=segments, DIRECT=False,
        WARPS=tiles.warps, PDL=use_pdl(),
        num_warps=tiles.warps, launch_pdl=use_pdl(),
    )  # fmt: skip
