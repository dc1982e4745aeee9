"""y = x W^T of packed codes for larger batches: codes are converted to weights in registers, which are inputs of the tensor cores.

    W   [COLUMNS, span]   the left side of tl.dot, converted again for each tile of rows: taller tiles need fewer conversions
    x   [ROWS, span]      the right side, through shared memory

A weight is rounded to the dtype of x as in `unpack`, so only the order of summation differs from a product of floats.
SHARED: if there are few tiles, the inner dimension is split over programs, `each` blocks for one, and `sum_shares` adds. WHOLE: blocks
and columns fill their tiles, so that no masks are needed.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.packed.common import MAX_SPAN, WORD_BITS, scale_and_offset, weights
from octavo.kernels.triton.packed.register_order import gathered, side_by_side, spread


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
