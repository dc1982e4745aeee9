"""y = x W^T + b whose bits do not depend on the number of rows: each sum is added up over the columns of W, from the first to the last.

    W   [COLUMNS, STEP]   the left side of tl.dot
    x   [ROWS, STEP]      the right side

A number of the result has one float32 sum, to which the tensor cores add the products of 16 columns at a time, in ascending order. No
tile size changes that order, so tiles may be chosen by the number of rows; the inner dimension is never split. Torch adds in the same
order in some of its kernels, and is then faster: it multiplies chunks of rows of fixed sizes if a trial shows equal bits.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.gates import GATES, Gate
from octavo.kernels.reference.products import multiply
from octavo.kernels.triton.invariant.tiles import GATED_ROWS, MIN_ROWS, Tiles, gated_tiles, tiles_for
from octavo.kernels.triton.packed.codes import ask_for
from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.elementwise import gate_and_mul, gated
from octavo.kernels.triton.target import capability, has_copy_engine, is_roomy

CHUNKS = (2048, 512)  # rows that torch may multiply at once
ALIGNED = 8  # columns of W, for copies of whole tiles
AHEAD = tl.constexpr(2048)  # bytes of each row of W that a program prefetches while the previous kernel still runs
SHARED_ROWS = tl.constexpr(8)  # tiles of rows that are next to each other, so that they find W in the L2 cache


@triton.jit
def load_lines(line, start, k, size, WHOLE: tl.constexpr):
    """Loads columns of lines from `start` on, zero after `size`."""
    return tl.load(line + start) if WHOLE else tl.load(line + start, mask=start + k < size, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def multiply_in_order(
    x,
    weight,
    x_tiles,
    weight_tiles,
    bias,
    out,
    rows,
    size,
    wide,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PREFETCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """wide: numbers of a row of the result. GATED: W has rows of gate over as many of up, and the result is gated.

    WHOLE: steps divide the columns of W. DESCRIBED: tiles are loaded by tensor descriptors, which fill with zeros.
    """
    begin(PDL)
    tall = tl.cdiv(rows, ROWS)
    turn, columns = tl.program_id(0), tl.cdiv(wide, COLUMNS)
    first = turn // (SHARED_ROWS * columns) * SHARED_ROWS
    held = tl.minimum(tall - first, SHARED_ROWS)
    top, left = (first + turn % (SHARED_ROWS * columns) % held) * ROWS, turn % (SHARED_ROWS * columns) // held * COLUMNS
    row, column = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    inside = column < wide
    k = tl.arange(0, STEP)[None, :]
    line_of_x = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * size + k
    line_of_w = weight + tl.minimum(column, wide - 1).to(tl.int64)[:, None] * size + k
    of_up = size.to(tl.int64) * wide  # where the rows of up begin; `wide` may be 1, which the compiler takes for a constant
    total, second = tl.zeros([COLUMNS, ROWS], tl.float32), tl.zeros([COLUMNS, ROWS], tl.float32)
    if PREFETCHED:
        ask_for(weight + tl.minimum(column, wide - 1).to(tl.int64) * size, tl.minimum(size * 2, AHEAD))
        if GATED:
            ask_for(weight + of_up + tl.minimum(column, wide - 1).to(tl.int64) * size, tl.minimum(size * 2, AHEAD))
    wait(PDL)
    for start in tl.range(0, size, STEP, num_stages=STAGES):
        if DESCRIBED:
            matrix, given = weight_tiles.load([left, start]), x_tiles.load([top, start])
        else:
            matrix, given = load_lines(line_of_w, start, k, size, WHOLE), load_lines(line_of_x, start, k, size, WHOLE)
        total = tl.dot(matrix, tl.trans(given), total, input_precision="ieee")
        if GATED:
            if DESCRIBED:
                matrix = weight_tiles.load([wide + left, start])
            else:
                matrix = load_lines(line_of_w + of_up, start, k, size, WHOLE)
            second = tl.dot(matrix, tl.trans(given), second, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    result = total.to(kind)
    if GATED:
        result = gated(result.to(tl.float32), second.to(kind).to(tl.float32), kind, GATE)
    at = row.to(tl.int64)[:, None] * wide + column[None, :]
    tl.store(out + at, tl.trans(result), mask=(row < rows)[:, None] & inside[None, :])


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out], in `out` if given"""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device) if out is None else out
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous() and x.shape[1] == weight.shape[1]
    first = 0
    for chunk in CHUNKS:
        while len(x) - first >= chunk and torch_agrees(chunk, *weight.shape, bias is not None, x.dtype, x.device):
            multiply(x[first : first + chunk], weight, bias, out[first : first + chunk])
            first += chunk
    if first < len(x):
        by_tiles(x[first:], weight, bias, out[first:], tiles_for(len(x) - first, len(weight), x.dtype))
    return out


def invariant_gate_up(x: Tensor, weight: Tensor, gate: Gate) -> Tensor:
    """x [rows, in], weight [2 * out, in], gate over up -> [rows, out]"""
    rows, wide = len(x), len(weight) // 2
    if rows > GATED_ROWS or not rows:
        return gate_and_mul(invariant_linear(x, weight), gate)
    out = torch.empty(rows, wide, dtype=x.dtype, device=x.device)
    return by_tiles(x, weight, None, out, gated_tiles(rows, wide, x.dtype), gate)


def by_tiles(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, how: Tiles, gate: Gate | None = None) -> Tensor:
    (rows, wide), size = out.shape, weight.shape[1]
    assert x.is_contiguous() and len(weight) == wide * (1 if gate is None else 2)
    described = is_roomy(capability()) and x.dtype.itemsize == 2 and size % ALIGNED == 0 and has_copy_engine(capability())
    pair = [
        TensorDescriptor(one, [len(one), size], [size, 1], [lines, how.step]) if described else one
        for one, lines in ((x, how.rows), (weight, how.columns))
    ]
    multiply_in_order[(triton.cdiv(rows, how.rows) * triton.cdiv(wide, how.columns),)](
        x, weight, *pair, x if bias is None else bias, out, rows, size, wide, ROWS=how.rows, COLUMNS=how.columns, STEP=how.step,
        STAGES=how.stages, GATED=gate is not None, GATE=GATES.index(gate or "swiglu"), BIASED=bias is not None,
        WHOLE=size % how.step == 0, DESCRIBED=described, PREFETCHED=described and rows <= MIN_ROWS and use_pdl(), PDL=use_pdl(),
        num_warps=how.warps, launch_pdl=use_pdl(),
    )  # fmt: skip
    return out


@cache
def torch_agrees(rows: int, wide: int, size: int, biased: bool, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's product of this shape has the bits of ours, for random numbers. If it added in another order, most would differ.

    Torch chooses a kernel by the shape, so its choice in a trial is that of every later product.
    """
    if device.type != "cuda" or dtype == torch.float32 or size % ALIGNED or wide % ALIGNED:
        return False
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(count, size, generator=generator, device=device, dtype=dtype) for count in (rows, wide))
    bias = torch.randn(wide, generator=generator, device=device, dtype=dtype) if biased else None
    ours, theirs = (torch.empty(rows, wide, device=device, dtype=dtype) for _ in range(2))
    by_tiles(x, weight, bias, ours, tiles_for(rows, wide, dtype))
    multiply(x, weight, bias, theirs)
    return torch.equal(ours, theirs)
