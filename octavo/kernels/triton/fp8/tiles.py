"""y = x W^T of 8-bit floats on the tensor cores, a tile of W per program, for any number of rows.

    W   [COLUMNS, 128]   the left side of tl.dot, so that small batches use the tensor cores fully, too
    x   [ROWS, 128]      the right side: 8-bit floats with their own scales; or wider floats, to which W is then converted

The tensor cores accumulate 8-bit products with less precision than float32, so the results for 128 columns are added up outside.
The scales of blocks are applied there; a scale of a whole row is applied at the end. SHARED: if there are few tiles, the inner
dimension is split over programs, `each` blocks for one, and `sum_shares` adds.
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
    """x_scale [1 or blocks, tall], if x is ROUNDED. WHOLE: steps and columns fill their tiles, so that no masks are needed."""
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
