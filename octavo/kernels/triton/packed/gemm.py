"""y = x W^T of packed codes on the tensor cores: `packed_small_gemm` for up to 16 rows, `packed_gemm` for more.

    small   codes are multiplied directly, and scaled later: reading them is the bottleneck
    more    codes are converted to weights in registers, which are inputs of the tensor cores

SHARED: if there are few tiles, the inner dimension is split over programs, `each` blocks for one, and `sum_shares` adds. WHOLE: tiles
and stretches divide the matrix, so that only rows are masked.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.packed.codes import MAX_SPAN, WORD_BITS, ask_for, four_bits, scale_and_offset, weights
from octavo.kernels.triton.pdl import begin, wait
from octavo.kernels.triton.step.elementwise import gated

# -- the order in which lines and words are loaded, so that each thread has the data for its part of tl.dot in its registers
#
# The left side of a dot is distributed like this: of sixteen lines a thread has one and the eighth after it, of eight columns two
# neighbours, and four threads share a line. A thread loads sixteen bytes of words (`device_codes.py` lists their columns), and
# warps take lines in turn; these functions only rename registers. Any other order is correct, too, but slower: Triton
# then moves numbers between threads through shared memory.


@triton.jit
def spread(LINES: tl.constexpr, WARPS: tl.constexpr):
    """The lines [threads, turns] to load, in the order in which the warps of a dot read its left side."""
    HELD: tl.constexpr = min(WARPS, LINES // 16)
    low, high = tl.arange(0, 8 * HELD)[:, None], tl.arange(0, LINES // (8 * HELD))[None, :]
    return high // 2 * (16 * HELD) + low // 8 * 16 + high % 2 * 8 + low % 8


@triton.jit
def gathered(words, LINES: tl.constexpr, WARPS: tl.constexpr, BY_FOURS: tl.constexpr):
    """[threads, turns, span] -> [LINES, span]: puts spread lines and words in order without moving data between threads.

    A thread holds two neighbouring columns of a dot's left side, and words are in the order of their columns. For tensor cores
    that are not asynchronous, Triton uses four as soon as spans are joined: then the order of `by_fours` applies.
    """
    HELD: tl.constexpr = min(WARPS, LINES // 16)
    SPAN: tl.constexpr = words.shape[2]
    apart = tl.reshape(words, [HELD, 8, LINES // (16 * HELD), 2, 4, 2, SPAN // 16, 2])
    if BY_FOURS:
        return tl.reshape(tl.permute(apart, (2, 0, 3, 1, 5, 4, 6, 7)), [LINES, SPAN])
    else:
        return tl.reshape(tl.permute(apart, (2, 0, 3, 1, 6, 5, 4, 7)), [LINES, SPAN])


@triton.jit
def by_fours(x):
    """[n, columns]; of 32, 0 1 16 17, 2 3 18 19, ... 6 7 22 23, 8 9 24 25, ..."""
    apart = tl.reshape(x, [x.shape[0], x.shape[1] // 32, 2, 2, 4, 2])
    return tl.reshape(tl.permute(apart, (0, 1, 3, 4, 2, 5)), [x.shape[0], x.shape[1]])


@triton.jit
def side_by_side(spans):
    """Joins one, two or four of [n, span]."""
    N: tl.constexpr = spans[0].shape[0]
    SPAN: tl.constexpr = spans[0].shape[1]
    if len(spans) == 1:
        return spans[0]
    elif len(spans) == 2:
        return tl.reshape(tl.permute(tl.join(spans[0], spans[1]), (0, 2, 1)), [N, 2 * SPAN])
    else:
        both = tl.join(tl.join(spans[0], spans[1]), tl.join(spans[2], spans[3]))
        return tl.reshape(tl.permute(both, (0, 3, 2, 1)), [N, 4 * SPAN])


# -- up to 16 rows: codes are multiplied directly and scaled later
#
#     sum_k x_k (scale * code_k + offset)  =  scale * sum_k x_k (code_k + 128)  +  (offset - 128 * scale) * sum_k x_k
#
# Both sums are tl.dot: the second one multiplies by ones, so that its result is in the same registers. A dot has 8 or 16 columns for
# the rows of x. SPLITS fills unused ones with other stretches of the same rows, and its lines with those of W; only equal stretches
# count:
#
#     lines of the dot      | stretch 0 of x | stretch 1 of x |
#     stretch 0 of W        | counts         |                |     added over stretches at the end: [COLUMNS, ROWS]
#     stretch 1 of W        |                | counts         |
#
# GATED: W is gate over up, and the result is gated. Here `each` counts blocks of a stretch. Sizes are run-time arguments.


@triton.jit
def column_of(line, program, wide, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """For a line of a program: the row of W, and whether it exists."""
    if GATED:
        place = program * (COLUMNS // 2) + line % (COLUMNS // 2)
        return place + line % COLUMNS // (COLUMNS // 2) * wide, place < wide
    place = program * COLUMNS + line % COLUMNS
    return place, place < wide


@triton.jit
def multiplied(codes, span, pairs, run: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, kind: tl.constexpr):
    """Multiplies the spans from run * RUN on of the words `codes` [lines, span], which share a scale, by x [RUN * span, lanes]."""
    BASE: tl.constexpr = 0 if kind == tl.float32 else 128 if BITS == 4 else 17 * 128  # `four_bits` of code 0
    numbers = ()
    higher = ()
    ones = ()
    for index in tl.static_range(run * RUN, run * RUN + RUN):
        ones = ones + (tl.full(codes.shape, 1.0, tl.float32).to(kind),)  # type: ignore[assignment]
        numbers = numbers + (four_bits(codes, BITS * index, 1, kind),)  # type: ignore[assignment]
        if BITS == 8:
            higher = higher + (four_bits(codes, BITS * index + 4, 16, kind),)  # type: ignore[assignment]
    product = tl.dot(side_by_side(numbers), span, input_precision="ieee")
    if BITS == 8:
        product = tl.dot(side_by_side(higher), span, product, input_precision="ieee")
    sums = tl.dot(side_by_side(ones), span, input_precision="ieee")
    scale, offset = scale_and_offset(pairs)
    return scale[:, None] * product + (offset - BASE * scale)[:, None] * sums


@triton.jit
def added_up(total, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """[lines, lanes] -> [COLUMNS, ROWS], summed over equal stretches"""
    LANES: tl.constexpr = total.shape[1]
    line, lane = tl.arange(0, SPLITS * COLUMNS)[:, None], tl.arange(0, LANES)[None, :]
    total = tl.where(line // COLUMNS == lane // ROWS, total, 0.0)
    return tl.sum(tl.sum(tl.reshape(total, [SPLITS, COLUMNS, LANES // ROWS, ROWS]), 2), 0)


@triton.jit
def store_result(
    result,
    bias,
    out,
    program,
    factor,
    rows,
    wide,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
):
    """Stores the result [COLUMNS, ROWS] of a program in out [rows, wide], after bias or gate."""
    HALF: tl.constexpr = COLUMNS // 2
    kind = out.dtype.element_ty
    row = tl.arange(0, ROWS)[None, :]
    result *= factor
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, [2, HALF, ROWS]), (1, 2, 0)))
        place = (program * HALF + tl.arange(0, HALF))[:, None]
        both = gated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind, GATE)
        tl.store(out + row * wide + place, both, mask=(row < rows) & (place < wide))
    else:
        place = (program * COLUMNS + tl.arange(0, COLUMNS))[:, None]
        if BIAS:
            result += tl.load(bias + place, mask=place < wide, other=0.0).to(tl.float32)
        tl.store(out + row * wide + place, result.to(kind), mask=(row < rows) & (place < wide))


@triton.jit(do_not_specialize=["rows", "each"])
def packed_small_gemm(
    x,
    words,
    scales,
    bias,
    out,
    parts,
    factor,
    rows,
    size,
    wide,
    each,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    PER_WORD: tl.constexpr = WORD_BITS // BITS
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = PER_WORD * SPAN
    RUN: tl.constexpr = min(GROUP // SPAN, PER_WORD)  # spans of a block with one scale
    LINES: tl.constexpr = SPLITS * COLUMNS
    blocks = tl.cdiv(size, BLOCK)

    begin(PDL)
    kind = x.dtype.element_ty
    share = tl.program_id(1)
    line, lane = tl.arange(0, LINES), tl.arange(0, LANES)
    column, present = column_of(line, tl.program_id(0), wide, COLUMNS, GATED)
    first = share * each * SPLITS
    if AHEAD and WHOLE:
        ask_for(words + (column.to(tl.int64) * blocks + first + line // COLUMNS * each) * SPAN, each * SPAN * 2)
    loaded = spread(LINES, WARPS)[:, :, None]
    loaded_column, loaded_present = column_of(loaded, tl.program_id(0), wide, COLUMNS, GATED)
    line_of_words = words + loaded_column.to(tl.int64) * (blocks * SPAN) + tl.arange(0, SPAN)[None, None, :]
    line_of_scales = scales + column.to(tl.int64) * tl.cdiv(blocks * BLOCK, GROUP)
    line_of_x = x + tl.minimum(lane % ROWS, rows - 1)[:, None] * size + tl.arange(0, RUN * SPAN)[None, :]
    split_of_x = tl.minimum(lane // ROWS, SPLITS - 1)
    total = tl.zeros([LINES, LANES], tl.float32)
    wait(PDL)
    for step in tl.range(0, each, num_stages=STAGES):
        block = first + step * SPLITS + line // COLUMNS
        loaded_block = first + step * SPLITS + loaded // COLUMNS
        if WHOLE:
            codes = tl.load(line_of_words + loaded_block * SPAN)
        else:
            codes = tl.load(line_of_words + loaded_block * SPAN, mask=loaded_present & (loaded_block < blocks), other=0)
        codes = gathered(codes, LINES, WARPS, RUN > 1)
        for run in tl.static_range(PER_WORD // RUN):
            place_of_scales = line_of_scales + (block * BLOCK + run * RUN * SPAN) // GROUP
            pairs = tl.load(place_of_scales) if WHOLE else tl.load(place_of_scales, mask=present & (block < blocks), other=0)
            k = (first + step * SPLITS + split_of_x)[:, None] * BLOCK + run * RUN * SPAN
            if WHOLE:
                span = tl.load(line_of_x + k)
            else:
                span = tl.load(line_of_x + k, mask=k + tl.arange(0, RUN * SPAN)[None, :] < size, other=0.0)
            if RUN > 1:
                span = by_fours(span)
            total += multiplied(codes, tl.trans(span), pairs, run, BITS, RUN, kind)

    result = added_up(total, COLUMNS, SPLITS, ROWS)
    if SHARED:
        row, place = tl.arange(0, ROWS)[None, :], (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[:, None]
        tl.store(parts + (share * rows + row) * wide + place, result, mask=(row < rows) & (place < wide))
    else:
        store_result(result, bias, out, tl.program_id(0), factor, rows, wide, COLUMNS, ROWS, BIAS, GATED, GATE)


# -- more rows: codes are converted to weights
#
#     W   [COLUMNS, span]   the left side of tl.dot, converted again for each tile of rows: taller tiles need fewer conversions
#     x   [ROWS, span]      the right side, through shared memory
#
# A weight is rounded to the dtype of x as in `unpack`, so only the order of summation differs from a product of floats.


@triton.jit(do_not_specialize=["rows", "each"])
def packed_gemm(
    x,
    words,
    scales,
    table,
    bias,
    out,
    parts,
    factor,
    rows,
    size,
    wide,
    each,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    PER_WORD: tl.constexpr = WORD_BITS // BITS
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = PER_WORD * SPAN
    RUN: tl.constexpr = min(GROUP // SPAN, PER_WORD)
    blocks = tl.cdiv(size, BLOCK)

    kind = x.dtype.element_ty
    share = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < wide
    loaded = (tl.program_id(1) * COLUMNS + spread(COLUMNS, WARPS))[:, :, None]
    line_of_words = words + loaded.to(tl.int64) * (blocks * SPAN) + tl.arange(0, SPAN)[None, None, :]
    line_of_scales = scales + column.to(tl.int64) * tl.cdiv(blocks * BLOCK, GROUP)
    line_of_x = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * size + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(share * each, tl.minimum((share + 1) * each, blocks), num_stages=STAGES):
        if WHOLE:
            codes = tl.load(line_of_words + block * SPAN)
        else:
            codes = tl.load(line_of_words + block * SPAN, mask=loaded < wide, other=0)
        codes = gathered(codes, COLUMNS, WARPS, False)
        spans = ()
        for run in tl.static_range(PER_WORD // RUN):
            place_of_scales = line_of_scales + (block * BLOCK + run * RUN * SPAN) // GROUP
            pairs = tl.load(place_of_scales) if WHOLE else tl.load(place_of_scales, mask=inside, other=0)
            scale, offset = scale_and_offset(pairs)
            for index in tl.static_range(run * RUN, run * RUN + RUN):
                made = weights(codes, table, scale * factor, offset * factor, index, BITS, TABLE, kind)
                spans = spans + (made,)  # type: ignore[assignment]
        if WHOLE:
            span = tl.load(line_of_x + block * BLOCK)
        else:
            span = tl.load(line_of_x + block * BLOCK, mask=block * BLOCK + tl.arange(0, BLOCK)[None, :] < size, other=0.0)
        total = tl.dot(side_by_side(spans), tl.trans(span), total, input_precision="ieee")

    stored = (row < rows)[None, :] & inside[:, None]
    at = row.to(tl.int64)[None, :] * wide + column[:, None]
    if SHARED:
        tl.store(parts + share.to(tl.int64) * rows * wide + at, total, mask=stored)
    else:
        if BIAS:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(out + at, total.to(kind), mask=stored)
