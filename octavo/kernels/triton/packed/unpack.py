"""Unpacks packed codes to weights in memory: consecutive rows, or rows by index."""

import triton
import triton.language as tl

from octavo.kernels.triton.packed.common import MAX_SPAN, WORD_BITS, scale_and_offset, weights


@triton.jit(do_not_specialize=["first", "count"])
def unpack_tile(
    words,
    scales,
    table,
    index,
    out,
    factor,
    first,
    count,
    size,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
    BY_INDEX: tl.constexpr,
):
    """Rows first, first + 1, ... (BY_INDEX: index[0], index[1], ...) -> out [count, size]"""
    PER_WORD: tl.constexpr = WORD_BITS // BITS
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = PER_WORD * SPAN
    blocks = tl.cdiv(size, BLOCK)
    groups = tl.cdiv(blocks * BLOCK, GROUP)

    kind = out.dtype.element_ty
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    inside = row < count
    source = tl.load(index + row, mask=inside, other=0).to(tl.int64) if BY_INDEX else (first + row).to(tl.int64)
    within = tl.arange(0, SPAN)[None, :]
    place = within % 8 // 2 * (SPAN // 4) + within // 8 % 2 * (SPAN // 8) + within // 16 * 2 + within % 2
    codes = tl.load(words + source[:, None] * (blocks * SPAN) + block * SPAN + place, mask=inside[:, None], other=0)
    for span in tl.static_range(PER_WORD):
        k = block * BLOCK + span * SPAN + within
        pairs = tl.load(scales + source * groups + (block * BLOCK + span * SPAN) // GROUP, mask=inside, other=0)
        scale, offset = scale_and_offset(pairs)
        matrix = weights(codes, table, scale * factor, offset * factor, span, BITS, TABLE, kind)
        tl.store(out + row.to(tl.int64)[:, None] * size + k, matrix, mask=inside[:, None] & (k < size))
