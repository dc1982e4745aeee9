"""y = x W^T for up to 16 rows: the rows, padded to 16, are one side of tl.dot, and W streams past them.

A program takes COLUMNS rows of W; where that makes too few programs for the GPU, the inner dimension is split too, each split
writes its part in float32, and `sum_parts` adds them in a fixed order. GATED: W is gate over up, silu(gate) * up comes out.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.activation import gated


@triton.jit(do_not_specialize=["rows"])
def product_tile(
    x,
    weight,
    bias,
    out,
    parts,
    rows,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(1)
    SHARE: tl.constexpr = (SIZE + SPLITS * DEPTH - 1) // (SPLITS * DEPTH) * DEPTH
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = (column < OUT)[:, None]
    line = weight + column.to(tl.int64)[:, None] * SIZE
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    sums_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(split * SHARE, tl.minimum((split + 1) * SHARE, SIZE), DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH)[None, :]
        rows_of_x = tl.load(x + row * SIZE + k, mask=(row < rows) & (k < SIZE), other=0.0)
        matrix = tl.load(line + k, mask=wanted & (k < SIZE), other=0.0)
        sums = tl.dot(rows_of_x, tl.trans(matrix), sums, input_precision="ieee")
        if GATED:
            second = tl.load(line + OUT * SIZE + k, mask=wanted & (k < SIZE), other=0.0)
            sums_up = tl.dot(rows_of_x, tl.trans(second), sums_up, input_precision="ieee")
    stored = (row < rows) & (column < OUT)[None, :]
    at = row * OUT + column[None, :]
    if SPLITS > 1:
        tl.store(parts + split * rows * OUT + at, sums, mask=stored)
    else:
        kind = out.dtype.element_ty
        if BIASED:
            sums += tl.load(bias + column, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
        result = sums.to(kind)
        if GATED:
            result = gated(result.to(tl.float32), sums_up.to(kind).to(tl.float32), kind)
        tl.store(out + at, result, mask=stored)


@triton.jit(do_not_specialize=["size"])
def sum_parts(parts, bias, out, size, OUT: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, TILE: tl.constexpr):
    """parts [SPLITS, size], bias [OUT] -> out [size], rows of OUT"""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < size
    total = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size + at, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + at % OUT, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
