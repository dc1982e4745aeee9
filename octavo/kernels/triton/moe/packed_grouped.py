"""An MoE layer with packed codes for larger batches: `grouped.py` does this for floats; codes are converted as in `packed/gemm.py`.

The gate is a separate kernel here: gate and up are stored next to each other, in the order of the tiles.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.moe.grouped import choices_of
from octavo.kernels.triton.packed.codes import MAX_SPAN, WORD_BITS, scale_and_offset, weights
from octavo.kernels.triton.packed.gemm import gathered, side_by_side, spread
from octavo.kernels.triton.pdl import begin, wait


@triton.jit(do_not_specialize=["choices"])
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
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """PICKED: x [T, SIZE] -> out [tiles * ROWS, WIDE], else x [tiles * ROWS, SIZE] -> out [choices, WIDE]"""
    PER_WORD: tl.constexpr = WORD_BITS // BITS
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = PER_WORD * SPAN
    RUN: tl.constexpr = min(GROUP // SPAN, PER_WORD)
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    GROUPS: tl.constexpr = (BLOCKS * BLOCK + GROUP - 1) // GROUP

    begin(PDL)
    tile = tl.program_id(1)
    kind = out.dtype.element_ty
    wait(PDL)
    if tile >= tl.load(count):
        return
    expert = tl.load(experts + tile).to(tl.int64)
    choice, there, line = choices_of(order, tile, choices, CHOSEN, ROWS, PICKED)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDE
    loaded = tl.minimum(tl.program_id(0) * COLUMNS + spread(COLUMNS, WARPS), WIDE - 1)[:, :, None]
    line_of_words = words + (expert * WIDE + loaded) * (BLOCKS * SPAN) + tl.arange(0, SPAN)[None, None, :]
    line_of_scales = scales + (expert * WIDE + tl.minimum(column, WIDE - 1)) * GROUPS
    within = tl.arange(0, BLOCK)[None, :]
    line_of_x = x + line.to(tl.int64)[:, None] * SIZE + within
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
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
    if BIASED:
        total += tl.load(bias + expert * WIDE + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = (tile * ROWS + tl.arange(0, ROWS) if PICKED else choice).to(tl.int64)
    tl.store(out + target[:, None] * WIDE + column[None, :], tl.trans(total.to(kind)), mask=there[:, None] & inside[None, :])
