"""Common parts of the kernels that filter a row: its tokens as bits of their distance from the best, d = (max - logit) / temperature.

    tops     [S, groups]     the largest logit of every GROUP tokens
    peaks    [S, tiles]      the largest logit of every TILE tokens
    members  [S, CAPACITY]   tokens near a cutoff, as bits and ids, in the order of their ids

No distance is negative, so bits have the same order as distances, and with the id below them all tokens are different. NaN
counts as -inf. Probabilities are fixed-point, so their sums do not depend on the order; they differ from those of
`kernels/reference/sampling.py` by the error of a float32 exponential.
"""

import triton
import triton.language as tl

TILE, GROUP, CAPACITY = 2048, 64, 4096
INFINITE, LARGEST = tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)
ONE = tl.constexpr(float(2**40))  # the fixed-point probability of the best token
KEY_BITS = tl.constexpr(31)
UNALIGNED = ["temperature", "top_k", "top_p", "min_p", "noise", "positions"]  # views of one row may start at any offset
RUNTIME = ["step", "noise_step"]
NEAREST_INTEGER = tl.constexpr(1.5 * 2**23)
LOG2_E = tl.constexpr(1.4426950408889634)
TINY, HUGE = tl.constexpr(1.1754943508222875e-38), tl.constexpr(3.4028234663852886e38)


@triton.jit
def read(logits, token, VOCAB: tl.constexpr):
    logit = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(logit == logit, logit, float("-inf"))


@triton.jit
def divide(x, heat):
    """x / heat, correctly rounded; for usual temperatures it takes three instructions and no branch for each x."""
    if (heat > 1e-3) & (heat < 1e3):
        inverse = tl.div_rn(tl.full([], 1.0, tl.float32), heat)
        near = x * inverse
        quotient = tl.fma(tl.fma(near, tl.zeros_like(x) - heat, x), inverse + tl.zeros_like(x), near)
    else:
        quotient = tl.div_rn(x, heat)
    return quotient


@triton.jit
def distance_bits(most, logit, heat):
    distance = divide(most - logit, heat)
    return tl.minimum(distance.to(tl.int32, bitcast=True) & LARGEST, INFINITE)  # NaN counts as infinitely far


@triton.jit
def mass_parts(bits):
    """exp(-distance) in fixed point as high * 2^20 + low: integers in float32, of which 16 add up without rounding.

    Adding and subtracting NEAREST_INTEGER rounds, and is faster than conversions. exp2 flushes denormals, while exp
    would handle them.
    """
    scaled = tl.exp2(bits.to(tl.float32, bitcast=True) * -LOG2_E) * 1048576.0
    high = (scaled + NEAREST_INTEGER) - NEAREST_INTEGER
    return high, ((scaled - high) * 1048576.0 + NEAREST_INTEGER) - NEAREST_INTEGER


@triton.jit
def mass(bits):
    high, low = mass_parts(bits)
    return (high.to(tl.int32).to(tl.int64) << 20) + low.to(tl.int32)


@triton.jit
def furthest(floor):
    """The largest bits with a probability of at least `floor`: tokens farther away do not pass min-p."""
    found = tl.full([], INFINITE, tl.int32)
    if floor > 0:
        found = tl.full([], 0, tl.int32)
        bit = tl.full([], 1, tl.int32) << (KEY_BITS - 1)
        for _ in range(KEY_BITS):
            trial = found | bit
            found = tl.where((trial < INFINITE) & (mass(trial) >= floor), trial, found)
            bit = bit >> 1
    return found


@triton.jit
def warmth(temperature):
    return tl.minimum(tl.maximum(tl.load(temperature), TINY), HUGE)


@triton.jit
def highest(peaks, TILES: tl.constexpr, PADDED_TILES: tl.constexpr):
    """The largest logit of a row."""
    tile = tl.arange(0, PADDED_TILES)
    return tl.max(tl.load(peaks + tile, mask=tile < TILES, other=float("-inf")), 0)


@triton.jit
def row_total(sums, TILES: tl.constexpr, PADDED_TILES: tl.constexpr):
    tile = tl.arange(0, PADDED_TILES)
    return tl.sum(tl.load(sums + tile, mask=tile < TILES, other=0), 0)


@triton.jit
def find_tops(logits, tops, peaks, VOCAB: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    GROUPS: tl.constexpr = TILE // GROUP
    token = tile * TILE + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    best = tl.max(read(logits + row * STRIDE, token, VOCAB), 1)  # [GROUPS]
    tl.store(tops + (row * tiles + tile) * GROUPS + tl.arange(0, GROUPS), best)
    tl.store(peaks + row * tiles + tile, tl.max(best, 0))


@triton.jit
def last_within(keys, weights, goal, BITS: tl.constexpr):
    """The largest number with less than `goal` of weight on keys below it: the key at which the goal is reached, or all ones if none."""
    found = tl.full([], 0, tl.int32)
    bit = tl.full([], 1, tl.int32) << (BITS - 1)
    for _ in range(BITS):
        below = tl.sum(tl.where(keys < (found | bit), weights, 0), 0)
        found = tl.where(below < goal, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit
def ties_within(goal, below, each):
    """How many of several equal tokens, each of weight `each`, have less than `goal` before them, if `below` precedes the first."""
    each = tl.maximum(each, 1)
    return tl.minimum((goal - below + each - 1) // each, 1 << 30).to(tl.int32)


@triton.jit
def cut_of(bits, ids, weights, goal, ID_BITS: tl.constexpr):
    """(bits, id) of the last token, in that order, with less than `goal` of weight before it. Equal bits have equal weights."""
    last = last_within(bits, weights, goal, KEY_BITS)
    tied = bits == last
    ties = ties_within(goal, tl.sum(tl.where(bits < last, weights, 0), 0), tl.max(tl.where(tied, weights, 0), 0))
    return last, last_within(ids, tied.to(tl.int32), ties, ID_BITS)


@triton.jit
def within(bits, ids, last_bits, last_id):
    return (bits < last_bits) | ((bits == last_bits) & (ids <= last_id))


@triton.jit
def mass_goal(top_p, total):
    """Tokens with less than this before them pass top-p: top_p * total, rounded up; the best one always passes."""
    part = top_p.to(tl.float64) * total.to(tl.float64)
    whole = part.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < part).to(tl.int64), 1)


@triton.jit
def collect(
    logits,
    peaks,
    most,
    heat,
    reach,
    low,
    high,
    ties_wanted,
    bits_at,
    ids_at,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Writes the members of a row: bits from `low` to `high`, only the first `ties_wanted` of those at `high`, and none beyond `reach`.

    Returns their number; if it is more than fit, it stops and returns some number above CAPACITY.
    """
    count = tl.full([], 0, tl.int32)
    ties = tl.full([], 0, tl.int32)
    tile = tl.full([], 0, tl.int32)
    while (tile < TILES) & (count <= CAPACITY):
        nearest = distance_bits(most, tl.load(peaks + tile), heat)
        if nearest <= tl.minimum(high, reach):
            token = tile * TILE + tl.arange(0, TILE)
            bits = distance_bits(most, read(logits, token, VOCAB), heat)
            inside = (token < VOCAB) & (bits >= low) & (bits <= tl.minimum(high, reach))
            tied = (inside & (bits == high)).to(tl.int32)
            inside = inside & ((bits < high) | (ties + tl.cumsum(tied, 0) <= ties_wanted))
            place = count + tl.cumsum(inside.to(tl.int32), 0) - 1
            fits = inside & (place < CAPACITY)
            tl.store(bits_at + place, bits, mask=fits)
            tl.store(ids_at + place, token, mask=fits)
            ties += tl.sum(tied, 0)
            count += tl.sum(inside.to(tl.int32), 0)
        tile += 1
    tl.debug_barrier()  # makes writes of other threads visible
    return count
