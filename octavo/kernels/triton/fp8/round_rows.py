"""Rounds rows of x to 8-bit floats, one row per program, with one scale for the row or one for each SPAN columns.

    values  [rows, SIZE]            scale  [SIZE / SPAN, rows]: the rows of a span are contiguous, as the matrix products read them
"""

import triton
import triton.language as tl

from octavo.kernels.fp8_matrix import FP8_LARGEST
from octavo.kernels.triton.pdl import begin, wait

LARGEST = tl.constexpr(FP8_LARGEST)


@triton.jit
def in_eight_bits(wide, kind: tl.constexpr, AXIS: tl.constexpr):
    """(float32 numbers as `kind`, their scale): the largest along an axis becomes the largest 8-bit float."""
    largest = tl.max(tl.abs(wide), AXIS, keep_dims=True)
    largest = tl.where(largest > 0, largest, LARGEST)
    fitted = wide * tl.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)
    values = tl.minimum(tl.maximum(fitted, -LARGEST), LARGEST).to(kind)
    return values, tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))


@triton.jit(do_not_specialize=["rows", "tall"])
def round_row(x, values, scale, rows, tall, SIZE: tl.constexpr, PADDED: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    """`rows`: of x; `tall`: including padding, which is zero"""
    begin(PDL)
    row = tl.program_id(0)
    SPANS: tl.constexpr = 1 if SPAN == SIZE else PADDED // SPAN
    WIDE: tl.constexpr = PADDED // SPANS
    span, column = tl.arange(0, SPANS)[:, None], tl.arange(0, WIDE)[None, :]
    inside = (span * SPAN + column < SIZE) & (column < SPAN)
    at = row.to(tl.int64) * SIZE + span * SPAN + column
    wait(PDL)
    wide = tl.load(x + at, mask=inside & (row < rows), other=0.0).to(tl.float32)
    rounded, step = in_eight_bits(wide, values.dtype.element_ty, 1)
    tl.store(values + at, rounded, mask=inside)
    tl.store(scale + span.to(tl.int64) * tall + row, step, mask=span * SPAN < SIZE)
