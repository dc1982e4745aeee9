"""y = x W^T of packed codes for up to 16 rows. Reading the codes is the bottleneck, so they are multiplied directly and scaled later:

    sum_k x_k (scale * code_k + offset)  =  scale * sum_k x_k (code_k + 128)  +  (offset - 128 * scale) * sum_k x_k

Both sums are tl.dot: the second one multiplies by ones, so that its result is in the same registers. A dot has 8 or 16 columns for the
rows of x. SPLITS fills unused ones with other stretches of the same rows, and its lines with those of W; only equal stretches count:

    lines of the dot      | stretch 0 of x | stretch 1 of x |
    stretch 0 of W        | counts         |                |     added over stretches at the end: [COLUMNS, ROWS]
    stretch 1 of W        |                | counts         |

SHARED: the inner dimension is split over programs, too, and `sum_shares` adds. GATED: W is gate over up, and the result is gated.
WHOLE: stretches and tiles divide the matrix, and only rows are masked. `each`: blocks of a stretch. Sizes are run-time arguments.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.packed.common import MAX_SPAN, WORD_BITS, ask_for, four_bits, scale_and_offset
from octavo.kernels.triton.packed.register_order import by_fours, gathered, side_by_side, spread
from octavo.kernels.triton.pdl import begin, wait
from octavo.kernels.triton.step.activation import gated


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
def stored(
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
        stored(result, bias, out, tl.program_id(0), factor, rows, wide, COLUMNS, ROWS, BIAS, GATED, GATE)
