"""y = x W^T of packed codes for up to 16 rows. Reading the codes is the limit, so they are multiplied as they are, scales come after:

    sum_k x_k (scale * code_k + offset)  =  scale * sum_k x_k (code_k + 16)  +  (offset - 16 * scale) * sum_k x_k

Both sums are tl.dot: the second one with ones, which leaves it where the first one lies. A dot has 8 or 16 columns for the rows of
x. SPLITS fills empty ones with other stretches of the same rows, and its lines with those of W; only like stretches count:

    lines of the dot      | stretch 0 of x | stretch 1 of x |
    stretch 0 of W        | counts         |                |     added over stretches at the end: [COLUMNS, ROWS]
    stretch 1 of W        |                | counts         |

SHARED: the inner dimension is split over programs, too, and `sum_shares` adds. GATED: W is gate over up, silu(gate) * up comes
out. WHOLE: stretches and tiles all are, and nothing but rows is masked. `each`: blocks of a stretch. Sizes are plain arguments.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.activation import gated
from octavo.kernels.triton.dependent import begin, wait
from octavo.kernels.triton.packed_parts import MAX_SPAN, WORD_BITS, four_bits, scale_and_offset


@triton.jit(do_not_specialize=["rows", "each"])
def packed_few(
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
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    PER_WORD: tl.constexpr = WORD_BITS // BITS
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = PER_WORD * SPAN
    RUN: tl.constexpr = min(GROUP // SPAN, PER_WORD)  # spans of a block with one scale
    BASE: tl.constexpr = 16 if BITS == 4 else 272  # what codes are counted from here
    HALF: tl.constexpr = COLUMNS // 2
    blocks = tl.cdiv(size, BLOCK)

    begin(DEPENDENT)
    kind = x.dtype.element_ty
    share = tl.program_id(1)
    line, lane = tl.arange(0, SPLITS * COLUMNS), tl.arange(0, LANES)
    if GATED:
        place = tl.program_id(0) * HALF + line % HALF
        column = place + line // HALF % 2 * wide
    else:
        place = tl.program_id(0) * COLUMNS + line % COLUMNS
        column = place
    first = (share * SPLITS + line // COLUMNS) * each
    row, first_of_x = lane % ROWS, (share * SPLITS + lane // ROWS) * each
    asked = (row < rows) & (lane < SPLITS * ROWS)
    within = tl.arange(0, SPAN)[None, :]
    line_of_words = words + column.to(tl.int64)[:, None] * (blocks * SPAN)
    line_of_scales = scales + column.to(tl.int64) * tl.cdiv(blocks * BLOCK, GROUP)
    ones = tl.full([SPLITS * COLUMNS, SPAN], 1.0, tl.float32).to(kind)
    total = tl.zeros([SPLITS * COLUMNS, LANES], tl.float32)
    wait(DEPENDENT)
    for step in tl.range(0, each, num_stages=STAGES):
        block = first + step
        inside = (place < wide) & (block < blocks)
        if WHOLE:
            codes = tl.load(line_of_words + (block * SPAN)[:, None] + within)
        else:
            codes = tl.load(line_of_words + (block * SPAN)[:, None] + within, mask=inside[:, None], other=0)
        for run in tl.static_range(PER_WORD // RUN):
            place_of_scales = line_of_scales + (block * BLOCK + run * RUN * SPAN) // GROUP
            pairs = tl.load(place_of_scales) if WHOLE else tl.load(place_of_scales, mask=inside, other=0)
            scale, offset = scale_and_offset(pairs)
            product = tl.zeros([SPLITS * COLUMNS, LANES], tl.float32)
            sums = tl.zeros([SPLITS * COLUMNS, LANES], tl.float32)
            for index in tl.static_range(run * RUN, run * RUN + RUN):
                k = ((first_of_x + step) * BLOCK + index * SPAN)[:, None] + within
                wanted = asked[:, None] if WHOLE else asked[:, None] & (k < size)
                span = tl.trans(tl.load(x + row[:, None] * size + k, mask=wanted, other=0.0))
                product = tl.dot(four_bits(codes, BITS * index, 1, kind), span, product, input_precision="ieee")
                if BITS == 8:
                    product = tl.dot(four_bits(codes, BITS * index + 4, 16, kind), span, product, input_precision="ieee")
                sums = tl.dot(ones, span, sums, input_precision="ieee")
            total += scale[:, None] * product + (offset - BASE * scale)[:, None] * sums

    total = tl.where((line // COLUMNS)[:, None] == (lane // ROWS)[None, :], total, 0.0)
    result = tl.sum(tl.sum(tl.reshape(total, [SPLITS, COLUMNS, LANES // ROWS, ROWS]), 2), 0)  # [COLUMNS, ROWS]
    row = tl.arange(0, ROWS)[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result * factor, [2, HALF, ROWS]), (1, 2, 0)))
        place = (tl.program_id(0) * HALF + tl.arange(0, HALF))[:, None]
        both = gated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind)
        tl.store(out + row * wide + place, both, mask=(row < rows) & (place < wide))
    else:
        place = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[:, None]
        stored = (row < rows) & (place < wide)
        if SHARED:
            tl.store(parts + (share * rows + row) * wide + place, result, mask=stored)
        else:
            result *= factor
            if BIAS:
                result += tl.load(bias + place, mask=place < wide, other=0.0).to(tl.float32)
            tl.store(out + row * wide + place, result.to(kind), mask=stored)
