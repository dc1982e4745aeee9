"""y = x W^T for the fewest rows: a program holds some rows of W whole, and multiplies each row of x by them in float32.

    W   [COLUMNS, SIZE]   in registers, read once and asked for first: the norm in front runs while it is on its way
    x   a row at a time, added to the residual stream and normalised by every program for itself (a few KB, out of the L2)

With NORM, residual add and RMS norm stand in front; with GATED, W is gate over up and silu(gate) * up comes out.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.activation import gated
from octavo.kernels.triton.norm import normed


@triton.jit(do_not_specialize=["rows"])
def product_few(
    x,
    residual,
    norm_weight,
    stream,
    weight,
    out,
    eps,
    rows,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
):
    program = tl.program_id(0)
    kind = x.dtype.element_ty
    k = tl.arange(0, PADDED)
    inside = k < SIZE
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    wanted = (column < OUT)[:, None] & inside[None, :]
    at = column.to(tl.int64)[:, None] * SIZE + k[None, :]
    matrix = tl.load(weight + at, mask=wanted, other=0.0).to(tl.float32)
    if GATED:
        second = tl.load(weight + OUT * SIZE + at, mask=wanted, other=0.0).to(tl.float32)
    if NORM:
        scales = tl.load(norm_weight + k, mask=inside, other=0.0)
    for row in range(rows):
        wide = tl.load(x + row * SIZE + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            added = (wide + tl.load(residual + row * SIZE + k, mask=inside, other=0.0).to(tl.float32)).to(kind)
            if program == 0:
                tl.store(stream + row * SIZE + k, added, mask=inside)
            wide = normed(added.to(tl.float32), scales, eps, SIZE, kind).to(tl.float32)
        result = tl.sum(matrix * wide[None, :], 1).to(kind)
        if GATED:
            result = gated(result.to(tl.float32), tl.sum(second * wide[None, :], 1).to(kind).to(tl.float32), kind)
        tl.store(out + row * OUT + column, result, mask=column < OUT)
