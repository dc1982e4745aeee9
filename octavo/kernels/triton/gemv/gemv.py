"""y = x W^T for the smallest batches: a program holds some whole rows of W, and multiplies each row of x by them in float32.

    W   [COLUMNS, SIZE]   in registers, read once and loaded first: the preceding operations run while it is in flight
    x   [ROWS, SIZE]      prepared by every program itself (a few KB, from the L2 cache) and held in registers, too

With ADDED, the residual add is fused: with AFTER after a norm of x, with NORM before one of the sum. With GATED, W is gate
over up and the result is gated. If LOOPED, a program processes several tiles of W, the next one in flight while one is multiplied,
and so prepares x once for all of them. W may be 8-bit floats (`kernels/fp8_matrix.py`), with SPAN columns per scale. The scale of a
row is applied to the sum, and those of blocks to x.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.fp8.widen import widened
from octavo.kernels.triton.pdl import begin, wait
from octavo.kernels.triton.step.activation import gated
from octavo.kernels.triton.step.norm import added, normed

RUN = tl.constexpr(16)  # 8-bit floats that a thread loads at once


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
