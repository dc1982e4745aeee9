"""The output product of decode attention, which also merges the splits of a context; `merge_heads` only merges.

    parts      [rows, SPLITS, HEADS, DIM]   float32, each split's own result
    parts_lse  [rows, SPLITS, HEADS]        its log-sum-exp in units of log2, -inf if a split is empty: then its part is not written

Every program merges by itself, which costs it a few KB from the L2 cache, but no separate kernel. Splits are filled from the
first on; TOGETHER of them are read at a time, the first ones before their number is known.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention.common import HIDDEN
from octavo.kernels.triton.gemv.gemv import multiply, tile_of
from octavo.kernels.triton.pdl import begin, wait

TOGETHER = tl.constexpr(4)


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
