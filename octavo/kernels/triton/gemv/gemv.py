"""y = x W^T for the smallest batches: a program holds some whole rows of W, and multiplies each row of x by them in float32.

    W   [COLUMNS, SIZE]   in registers, read once and loaded first: the preceding operations run while it is in flight
    x   [ROWS, SIZE]      prepared by every program itself (a few KB, from the L2 cache) and held in registers, too

With ADDED, the residual add is fused: with AFTER after a norm of x, with NORM before one of the sum. With GATED, W is gate
over up and the result is gated. If LOOPED, a program processes several tiles of W, the next one in flight while one is multiplied,
and so prepares x once for all of them. W may be 8-bit floats (`kernels/fp8_matrix.py`), with SPAN columns per scale. The scale of a
row is applied to the sum, and those of blocks to x. In `merge_gemv`, x is the merged splits of decode attention.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention.common import HIDDEN
from octavo.kernels.triton.pdl import begin, wait
from octavo.kernels.triton.step.elementwise import gated
from octavo.kernels.triton.step.norm import added, normed

REBASE = tl.constexpr(2.0**120)  # the exponent bias of e4m3 is 7, that of float32 127
RUN = tl.constexpr(16)  # 8-bit floats that a thread loads at once
TOGETHER = tl.constexpr(4)  # splits that are merged at once


@triton.jit
def widened(values):
    """Converts bytes or 8-bit floats to float32, exactly. Wider floats are only converted to float32.

    Where a GPU has no instruction for it, 8-bit floats are loaded as bytes, and bits are moved.
    """
    if values.dtype == tl.uint8:
        bits = values.to(tl.uint32)
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * REBASE
    else:
        return values.to(tl.float32)


@triton.jit
def tile_of(weight, tile, SIZE: tl.constexpr, PADDED: tl.constexpr, OUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads rows of weight [OUT, SIZE] from tile * COLUMNS on, unconverted; zero outside."""
    return tile_up_to(weight, tile, SIZE, SIZE, PADDED, OUT, COLUMNS)


@triton.jit
def tile_up_to(weight, tile, size, SIZE: tl.constexpr, PADDED: tl.constexpr, OUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Like `tile_of`. `size`: SIZE, as a compile-time or run-time value"""
    column = tile * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    k = tl.arange(0, PADDED)[None, :]
    return tl.load(weight + column.to(tl.int64) * SIZE + k, mask=(column < OUT) & (k < size), other=0.0)


@triton.jit
def summed(matrix, x, scale, first, inside, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr):
    """Rows of W from `first` on, loaded in `matrix`, times a row x [PADDED] float32. scale: of all W; inside: which rows exist

    With scales of blocks, a thread first adds its contiguous elements, which are in one block.
    """
    if SPAN > 0 and SPAN < SIZE:
        RUNS: tl.constexpr = x.shape[0] // RUN
        run = tl.arange(0, RUNS)
        scales = tl.load(scale + first // SPAN * (SIZE // SPAN) + run * RUN // SPAN, mask=run * RUN < SIZE, other=0.0)
        sums = tl.sum(tl.reshape(matrix, [COLUMNS, RUNS, RUN]) * tl.reshape(x, [RUNS, RUN])[None, :, :], 2)
        sums = tl.sum(sums * scales[None, :], 1)
    else:
        sums = tl.sum(matrix * x[None, :], 1)
    if SPAN == SIZE:
        sums *= tl.load(scale + first + tl.arange(0, COLUMNS), mask=inside, other=0.0)
    return sums


@triton.jit
def multiply(
    matrix,
    second,
    scale,
    held,
    bias,
    out,
    tile,
    rows,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Stores the products of the held rows with one tile of W."""
    kind = out.dtype.element_ty
    first = tile * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside, wide = column < OUT, widened(matrix)
    for row in tl.static_range(ROWS):
        x = held[row].to(tl.float32)
        sums = summed(wide, x, scale, first, inside, SIZE, COLUMNS, SPAN)
        if BIASED:
            sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        result = sums.to(kind)
        if GATED:
            up = summed(widened(second), x, scale, OUT + first, inside, SIZE, COLUMNS, SPAN)
            result = gated(result.to(tl.float32), up.to(kind).to(tl.float32), kind, GATE)
        tl.store(out + row * OUT + column, result, mask=(column < OUT) & (row < rows))


@triton.jit(do_not_specialize=["rows"])
def gemv(
    x,
    residual,
    after_weight,
    norm_weight,
    stream,
    normed_rows,
    weight,
    weight_scale,
    bias,
    out,
    eps,
    scale,
    rows,
    size,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ADDED: tl.constexpr,
    AFTER: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    KEEP_NORMED: tl.constexpr,  # rows after the norm are stored in `normed_rows`
    LOOPED: tl.constexpr,
    SPAN: tl.constexpr,  # columns of W that share a scale; 0: none
    PDL: tl.constexpr,
):
    begin(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    kind = x.dtype.element_ty
    k = tl.arange(0, PADDED)
    inside = k < SIZE
        # ptxas turns a constant 8-bit zero into NaN, so for such weights the padding must not be known at compile time
    end = size if SPAN > 0 and SIZE < PADDED else SIZE
    matrix = tile_up_to(weight, program, end, SIZE, PADDED, OUT, COLUMNS)
    second = matrix
    if GATED:
        second = tile_up_to(weight + OUT * SIZE, program, end, SIZE, PADDED, OUT, COLUMNS)
    scales = tl.load(norm_weight + k, mask=inside, other=0.0) if NORM else k
    of_after = tl.load(after_weight + k, mask=inside, other=0.0) if AFTER else k
    wait(PDL)

    held = ()
    for row in tl.static_range(ROWS):
        present = inside & (row < rows)
        ready = tl.load(x + row * SIZE + k, mask=present, other=0.0)
        if ADDED:
            sums = added(ready, tl.load(residual + row * SIZE + k, mask=present, other=0.0), of_after, eps, scale, SIZE, AFTER, SCALED)
            ready = normed(sums.to(tl.float32), scales, eps, SIZE, kind) if NORM else sums
            if program == 0:
                tl.store(stream + row * SIZE + k, sums, mask=present)
                if KEEP_NORMED:
                    tl.store(normed_rows + row * SIZE + k, ready, mask=present)
        held = held + (ready,)  # type: ignore[assignment]

    if LOOPED:
        for tile in tl.range(program, (OUT + COLUMNS - 1) // COLUMNS, programs):
            following = tile_up_to(weight, tile + programs, end, SIZE, PADDED, OUT, COLUMNS)
            if GATED:
                following_second = tile_up_to(weight + OUT * SIZE, tile + programs, end, SIZE, PADDED, OUT, COLUMNS)
            multiply(matrix, second, weight_scale, held, bias, out, tile, rows, SIZE, OUT, COLUMNS, ROWS, GATED, GATE, BIASED, SPAN)
            matrix = following
            if GATED:
                second = following_second
    else:
        multiply(matrix, second, weight_scale, held, bias, out, program, rows, SIZE, OUT, COLUMNS, ROWS, GATED, GATE, BIASED, SPAN)


# -- the merged splits of decode attention
#
#     parts      [rows, SPLITS, HEADS, DIM]   float32, each split's own result
#     parts_lse  [rows, SPLITS, HEADS]        its log-sum-exp in units of log2, -inf if a split is empty: then its part is not written
#
# Every program merges by itself, which costs it a few KB from the L2 cache, but no separate kernel. Splits are filled from the
# first on; TOGETHER of them are read at a time, the first ones before their number is known.


@triton.jit
def tile_of_heads(
    weight,
    tile,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Loads rows of weight [OUT, HEADS * DIM] as [COLUMNS, HEADS_TILE * DIM_TILE], each head padded with zeros like `merged`."""
    if DIM == DIM_TILE:
        return tile_of(weight, tile, HEADS * DIM, HEADS_TILE * DIM, OUT, COLUMNS)
    else:
        column, k = tile * COLUMNS + tl.arange(0, COLUMNS)[:, None], tl.arange(0, HEADS_TILE * DIM_TILE)[None, :]
        head, dim = k // DIM_TILE, k % DIM_TILE
        inside = (column < OUT) & (head < HEADS) & (dim < DIM)
        return tl.load(weight + column.to(tl.int64) * (HEADS * DIM) + head * DIM + dim, mask=inside, other=0.0)


@triton.jit
def blend(
    parts,
    parts_lse,
    start,
    head,
    present,
    largest,
    total,
    mixed,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Merges splits start .. start + TOGETHER into (largest, total, mixed). parts [SPLITS, HEADS, DIM]; head, present [HEADS_TILE, 1]"""
    dim = tl.arange(0, DIM_TILE)[None, :]
    sums = ()
    tiles = ()
    for index in tl.static_range(TOGETHER):  # all are loaded before any is used
        wanted = present & (start + index < SPLITS)
        at = (start + index) * HEADS + head
        sums = sums + (tl.load(parts_lse + at, mask=wanted, other=float("-inf")),)  # type: ignore[assignment]
        tiles = tiles + (tl.load(parts + at * DIM + dim, mask=wanted & (dim < DIM), other=0.0),)  # type: ignore[assignment]
    for index in tl.static_range(TOGETHER):
        now = tl.maximum(largest, sums[index])
        weight, fade = tl.exp2(sums[index] - now), tl.exp2(largest - now)
        total = total * fade + weight
        mixed = mixed * fade + tl.where(sums[index] > float("-inf"), tiles[index], 0.0) * weight
        largest = now
    return largest, total, mixed


@triton.jit
def merged(
    parts,
    parts_lse,
    here,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    kind: tl.constexpr,
):
    """One row [HEADS_TILE * DIM_TILE] as `kind`; zero if no split saw a key, or if the row is not `here`."""
    split = tl.arange(0, SPLITS)
    filled = tl.load(parts_lse + split * HEADS, mask=(split < SPLITS) & here, other=float("-inf")) > float("-inf")
    head = tl.arange(0, HEADS_TILE)[:, None]
    present = (head < HEADS) & here
    largest = tl.full([HEADS_TILE, 1], HIDDEN, tl.float32)
    total = tl.zeros([HEADS_TILE, 1], tl.float32)
    mixed = tl.zeros([HEADS_TILE, DIM_TILE], tl.float32)
    largest, total, mixed = blend(parts, parts_lse, 0, head, present, largest, total, mixed, SPLITS, HEADS, DIM, DIM_TILE)
    for start in range(TOGETHER, tl.sum(filled.to(tl.int32), 0), TOGETHER):
        largest, total, mixed = blend(parts, parts_lse, start, head, present, largest, total, mixed, SPLITS, HEADS, DIM, DIM_TILE)
    result = mixed / tl.where(total > 0, total, 1.0)
    return result.to(kind).reshape(HEADS_TILE * DIM_TILE)


@triton.jit(do_not_specialize=["rows"])
def merge_gemv(
    parts,
    parts_lse,
    weight,
    bias,
    out,
    rows,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    program = tl.program_id(0)
    matrix = tile_of_heads(weight, program, HEADS, HEADS_TILE, DIM, DIM_TILE, OUT, COLUMNS)
    wait(PDL)
    held = ()
    for row in tl.static_range(ROWS):
        at = row * SPLITS * HEADS
        whole = merged(parts + at * DIM, parts_lse + at, row < rows, SPLITS, HEADS, HEADS_TILE, DIM, DIM_TILE, out.dtype.element_ty)
        held = held + (whole,)  # type: ignore[assignment]
    multiply(matrix, matrix, weight, held, bias, out, program, rows, HEADS * DIM, OUT, COLUMNS, ROWS, False, 0, BIASED, 0)


@triton.jit
def merge_heads(
    parts, parts_lse, out, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):
    """Merges one head of a row per program. out [rows, HEADS, DIM]"""
    begin(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    at = row * SPLITS * HEADS + head
    wait(PDL)
    whole = merged(parts + at * DIM, parts_lse + at, True, SPLITS, HEADS, 1, DIM, DIM_TILE, out.dtype.element_ty)
    dim = tl.arange(0, DIM_TILE)
    tl.store(out + (row * HEADS + head) * DIM + dim, whole, mask=dim < DIM)
