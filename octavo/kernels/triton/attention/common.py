"""Common parts of the decode and prefill kernels: the address of a key, the score, and one tile of softmax.

Scores stay unscaled; `unit` converts them to units of log2 inside the exponential, in one fused multiply-add,
and exp2 is the GPU's native exponential. A cap or a slope needs the true score, whose unit is log2(e). A masked score
is a large negative number instead of -inf, so that differences stay finite. It is far below the initial largest score,
so that a tile without visible keys adds nothing.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LOG2E = tl.constexpr(LOG2_E)
HIDDEN = tl.constexpr(-1.0e30)
LOWEST = tl.constexpr(-1.0e28)


@triton.jit
def slots_of(table, position, mask, region_size, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr):
    """The slot of each position of a row. If PAGED, `table` holds its blocks; otherwise its first entry is the row's region."""
    if PAGED:
        block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
        return block * BLOCK_SIZE + position % BLOCK_SIZE
    else:
        return tl.load(table).to(tl.int64) * region_size + position


@triton.jit
def place_of(slot, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TOGETHER: tl.constexpr):
    """The address of a head in a slot. TOGETHER tokens of a head are contiguous: 1, or a block of them (`cache_layout.py`)."""
    among = slot & (TOGETHER - 1)
    return ((slot - among) * KV_HEADS + kv_head * TOGETHER + among) * DIM


@triton.jit
def places_of(
    table,
    position,
    mask,
    kv_head,
    region_size,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The addresses of a head at the positions of a row."""
    return place_of(slots_of(table, position, mask, region_size, BLOCK_SIZE, PAGED), kv_head, KV_HEADS, DIM, TOGETHER)


@triton.jit
def load_lines(source, place, inside, DIM: tl.constexpr, DIM_TILE: tl.constexpr, MASKED: tl.constexpr):
    """Loads a head at each address [N] -> [N, DIM_TILE]; zeros after DIM and, if MASKED, outside."""
    dim = tl.arange(0, DIM_TILE)
    pointers = source + place[:, None] + dim[None, :]
    if MASKED:
        return tl.load(pointers, mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM < DIM_TILE:
        return tl.load(pointers, mask=(dim < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def capped(scores, scale, cap, CAPPED: tl.constexpr):
    """cap * tanh(scale * score / cap). Without a cap, scores stay unscaled."""
    if CAPPED:
        return cap - 2 * cap / (tl.exp2(scores * (2 * LOG2E * scale / cap)) + 1)
    else:
        return scores


@triton.jit
def score(q, keys, scale, cap, slope, behind, CAPPED: tl.constexpr, SLOPED: tl.constexpr):
    """q [M, DIM], keys [N, DIM] -> [M, N] float32; float32 is never computed as tf32. behind [M, N]: key's position - query's"""
    scores = capped(tl.dot(q, tl.trans(keys), input_precision="ieee"), scale, cap, CAPPED)
    if SLOPED and not CAPPED:
        scores *= scale
    if SLOPED:
        scores += slope[:, None] * behind.to(tl.float32)
    return scores


@triton.jit
def begin(sinks, head, present, unit, ROWS: tl.constexpr, DIM_TILE: tl.constexpr, WITH_SINKS: tl.constexpr):
    """The initial (largest, total, mixed): empty, or the head's sink, a score without a value."""
    mixed = tl.zeros([ROWS, DIM_TILE], tl.float32)
    if WITH_SINKS:
        sink = tl.load(sinks + head, mask=present, other=0.0).to(tl.float32) * (LOG2E / unit)
        return tl.maximum(sink, LOWEST), tl.full([ROWS], 1.0, tl.float32), mixed
    else:
        return tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), mixed


@triton.jit
def weigh(scores, largest, total, unit):
    """One step of online softmax: the new (largest, total), the weights of the tile, and the factor for earlier sums."""
    now = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores * unit - (now * unit)[:, None])
    fade = tl.exp2((largest - now) * unit)
    return now, total * fade + tl.sum(weights, 1), weights, fade


@triton.jit
def mix(weights, fade, values, mixed):
    return tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")


@triton.jit
def finish(largest, total, mixed, unit):
    """(output, log-sum-exp in units of log2); zeros and -inf if no key was visible."""
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    return mixed / safe[:, None], tl.where(seen, largest * unit + tl.log2(safe), float("-inf"))
