"""An MoE layer for larger batches: tiles of rows for one expert, times tiles of its matrix (`sort.py` sorts rows by expert).

    W   [COLUMNS, STEP]   the left side of tl.dot, so that small tiles use the tensor cores fully, whose left side has at least 64 lines
    x   [ROWS, STEP]      the right side: rows of tokens by index, or rows that the previous product stored in sorted order

If GATED, W is gate over up: rows of x are loaded by token, and gated values are stored in the order of the tiles. Otherwise rows are
read in that order, and each result is stored in the line of its choice, for `sum_choices`.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.pdl import begin, wait
from octavo.kernels.triton.step.activation import gated


@triton.jit
def load_step(line, start, k, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Loads columns of lines from `start` on, zero after SIZE."""
    return tl.load(line + start) if SIZE % STEP == 0 else tl.load(line + start, mask=start + k < SIZE, other=0.0)


@triton.jit
def choices_of(order, tile, choices, CHOSEN: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """(the choices of a tile's rows, whether they are valid, the line of x for each). Padding reads any line."""
    place = tile * ROWS + tl.arange(0, ROWS)
    choice = tl.load(order + place)
    there = choice < choices
    return choice, there, tl.where(there, choice // CHOSEN, 0) if GATED else place


@triton.jit(do_not_specialize=["choices"])
def multiply_tiles(
    x,
    order,
    experts,
    count,
    weight,
    bias,
    out,
    choices,
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
    PDL: tl.constexpr,
):
    """out: GATED [tiles * ROWS, WIDE], else [choices, WIDE]"""
    begin(PDL)
    tile = tl.program_id(1)
    kind = out.dtype.element_ty
    HEIGHT: tl.constexpr = 2 * WIDE if GATED else WIDE  # rows of an expert's matrix
    wait(PDL)
    if tile >= tl.load(count):
        return
    expert = tl.load(experts + tile).to(tl.int64)
    choice, there, line = choices_of(order, tile, choices, CHOSEN, ROWS, GATED)
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
    target = (tile * ROWS + tl.arange(0, ROWS) if GATED else choice).to(tl.int64)
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
        total += part * tl.load(weights + choice)
    tl.store(out + token.to(tl.int64) * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)
