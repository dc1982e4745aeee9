"""y = x W^T of 8-bit floats by the matrix units, a tile of W a program, for any number of rows.

    W   [COLUMNS, 128]   the left side of tl.dot, so that few rows fill the matrix units, too
    x   [ROWS, 128]      the right side: 8-bit floats with scales of their own; or wider floats, which W is then widened to

The matrix units add 8-bit products with fewer bits than float32 has, so what they give for 128 columns is added up beside them.
There the scales of blocks come in; a scale of a whole row comes at the end. SHARED: where tiles are few the inner dimension is split
over programs, `each` blocks for one, and `sum_shares` adds.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.fp8.widen import widened
from octavo.kernels.triton.pdl import begin, wait

STEP = tl.constexpr(128)  # columns multiplied at once, and those of a block


@triton.jit(do_not_specialize=["rows", "tall", "each"])
def fp8_tiles(
    x,
    x_scale,
    values,
    scale,
    bias,
    out,
    parts,
    rows,
    tall,
    size,
    wide,
    each,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROUNDED: tl.constexpr,
    WHOLE: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """x_scale [1 or blocks, tall], if x is ROUNDED. WHOLE: steps and columns fill their tiles, so that those are not masked."""
    begin(PDL)
    share = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, k = tl.minimum(row, rows - 1), tl.arange(0, STEP)[None, :]
    inside, blocks = column < wide, tl.cdiv(size, STEP)
    line_of_w = values + tl.minimum(column, wide - 1).to(tl.int64)[:, None] * size + k
    line_of_x = x + there.to(tl.int64)[:, None] * size + k
    line_of_scale = scale + tl.program_id(0) * COLUMNS // STEP * blocks
    wait(PDL)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(share * each, tl.minimum((share + 1) * each, blocks), num_stages=STAGES):
        if WHOLE:
            matrix, given = tl.load(line_of_w + block * STEP), tl.load(line_of_x + block * STEP)
        else:
            present = block * STEP + k < size
            matrix = tl.load(line_of_w + block * STEP, mask=present, other=0.0)
            given = tl.load(line_of_x + block * STEP, mask=present, other=0.0)
        if not ROUNDED:
            matrix = widened(matrix).to(given.dtype)
        if BLOCKS:
            step = tl.load(line_of_scale + block)
            if ROUNDED:
                total += tl.dot(matrix, tl.trans(given)) * (tl.load(x_scale + block * tall + there) * step)[None, :]
            else:
                total += tl.dot(matrix, tl.trans(given), input_precision="ieee") * step
        elif ROUNDED:
            total = tl.dot(matrix, tl.trans(given), total, max_num_imprecise_acc=STEP)
        else:
            total = tl.dot(matrix, tl.trans(given), total, input_precision="ieee")
    if not BLOCKS:
        total *= tl.load(scale + column, mask=inside, other=0.0)[:, None]
        if ROUNDED:
            total *= tl.load(x_scale + there)[None, :]

    stored = (row < rows)[None, :] & inside[:, None]
    at = row.to(tl.int64)[None, :] * wide + column[:, None]
    if SHARED:
        tl.store(parts + share.to(tl.int64) * rows * wide + at, total, mask=stored)
    else:
        if BIAS:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)
