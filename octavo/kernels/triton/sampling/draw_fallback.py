"""Samples from a row that the faster kernels could not decide, by one program that reads the whole row several times.

Such rows have too many tokens near the cutoff (large k, many ties), a top-p with none of the first racers within
it, or no finite logits. The k-th token is found by dividing ranges of bits into four. For top-p the race comes first: if its winner has
too much probability before it, so have all tokens after it, and the next race is among those before. Each race also halves the range of
bits that contains the cutoff, so that there are few.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.sampling.distances import (
    INFINITE,
    LARGEST,
    collect,
    cut_of,
    distance_bits,
    mass,
    mass_goal,
    read,
    within,
)
from octavo.kernels.triton.sampling.draw_state import (
    AT_ONCE,
    HEAT,
    KNOWN,
    MOST,
    NOISE,
    PICK,
    PICKS,
    POSITION,
    RACED,
    REACH,
    SETTLED,
    STATE,
    TOP_P,
    TOTAL,
    K,
    fitting,
    integer,
    number,
)
from octavo.kernels.triton.sampling.sample import gumbel, uniform

PIVOT_1, PIVOT_2, PIVOT_3 = tl.constexpr(0x40000000), tl.constexpr(0x40C00000), tl.constexpr(0x41800000)  # distances 2, 6, 16


@triton.jit
def race_row(
    logits,
    most,
    heat,
    reach,
    cut_bits,
    cut_id,
    noise,
    position,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The token within a cutoff with the highest score."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    owner = tl.zeros([TILE], tl.int32)
    for tile in range(TILES):
        token = tile * TILE + tl.arange(0, TILE)
        bits = distance_bits(most, read(logits, token, VOCAB), heat)
        kept = (token < VOCAB) & within(bits, token, cut_bits, cut_id) & (bits <= reach)
        score = gumbel(uniform(noise, position, tile, TILE)) - bits.to(tl.float32, bitcast=True)
        better = kept & (score > best)
        owner = tl.where(better, token, owner)
        best = tl.where(better, score, best)
    return tl.min(tl.where(best == tl.max(best, 0), owner, VOCAB - 1), 0)


@triton.jit
def weigh_row(logits, most, heat, reach, cut_bits, cut_id, middle, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """The total within a cutoff, and the part of it with bits below `middle`."""
    total = tl.zeros([TILE], tl.int64)
    nearer = tl.zeros([TILE], tl.int64)
    for tile in range(TILES):
        token = tile * TILE + tl.arange(0, TILE)
        bits = distance_bits(most, read(logits, token, VOCAB), heat)
        masses = mass(bits)
        masses = tl.where((token < VOCAB) & (bits <= reach) & within(bits, token, cut_bits, cut_id), masses, 0)
        total += masses
        nearer += tl.where(bits < middle, masses, 0)
    return tl.sum(total, 0), tl.sum(nearer, 0)


@triton.jit
def count_below(logits, most, heat, reach, first, second, third, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """How many tokens have bits below each of three values."""
    below_1 = tl.zeros([TILE], tl.int32)
    below_2 = tl.zeros([TILE], tl.int32)
    below_3 = tl.zeros([TILE], tl.int32)
    for tile in range(TILES):
        token = tile * TILE + tl.arange(0, TILE)
        bits = distance_bits(most, read(logits, token, VOCAB), heat)
        bits = tl.where((token < VOCAB) & (bits <= reach), bits, LARGEST)
        below_1 += (bits < first).to(tl.int32)
        below_2 += (bits < second).to(tl.int32)
        below_3 += (bits < third).to(tl.int32)
    return tl.sum(below_1, 0), tl.sum(below_2, 0), tl.sum(below_3, 0)


@triton.jit
def nth_equal(logits, most, heat, wanted, nth, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """The nth token, by id, with the bits `wanted`; VOCAB if there are fewer."""
    found = tl.full([], VOCAB, tl.int32)
    seen = tl.full([], 0, tl.int32)
    tile = tl.full([], 0, tl.int32)
    while (tile < TILES) & (seen < nth):
        token = tile * TILE + tl.arange(0, TILE)
        tied = (token < VOCAB) & (distance_bits(most, read(logits, token, VOCAB), heat) == wanted)
        order = seen + tl.cumsum(tied.to(tl.int32), 0)
        found = tl.min(tl.where(tied & (order == nth), token, VOCAB), 0)
        seen += tl.sum(tied.to(tl.int32), 0)
        tile += 1
    return found


@triton.jit
def cut_count(
    logits,
    peaks,
    most,
    heat,
    reach,
    k,
    bits_at,
    ids_at,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    """(bits, id) of the k-th token: the range of bits that contains it is divided into four until its tokens fit."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], INFINITE, tl.int32)
    below = tl.full([], 0, tl.int32)  # how many come before `low`
    first = tl.full([], PIVOT_1, tl.int32)
    second = tl.full([], PIVOT_2, tl.int32)
    third = tl.full([], PIVOT_3, tl.int32)
    count = tl.full([], CAPACITY + 1, tl.int32)
    while (count > CAPACITY) & (low < high):
        for _ in range(2):
            a, b, c = count_below(logits, most, heat, reach, first, second, third, VOCAB, TILE, TILES)
            high = tl.minimum(high, tl.where(a >= k, first, tl.where(b >= k, second, tl.where(c >= k, third, LARGEST))) - 1)
            below = tl.where(c < k, c, tl.where(b < k, b, tl.where(a < k, a, below)))
            low = tl.minimum(tl.where(c < k, third, tl.where(b < k, second, tl.where(a < k, first, low))), high)
            quarter = (high - low) // 4 + 1
            first = low + quarter
            second = first + quarter
            third = second + quarter
        count = collect(logits, peaks, most, heat, reach, low, high, VOCAB, bits_at, ids_at, VOCAB, TILE, TILES, CAPACITY)
    last = low
    last_id = tl.full([], VOCAB, tl.int32)
    if count <= CAPACITY:
        slot = tl.arange(0, CAPACITY)
        bits = tl.load(bits_at + slot, mask=slot < count, other=LARGEST)
        ids = tl.load(ids_at + slot, mask=slot < count, other=VOCAB)
        last, last_id = cut_of(bits, ids, (slot < count).to(tl.int32), k - below, ID_BITS)
    else:  # more tokens than fit are equal
        last_id = nth_equal(logits, most, heat, last, k - below, VOCAB, TILE, TILES)
    return last, last_id


@triton.jit
def search_row(
    logits,
    peaks,
    most,
    heat,
    reach,
    k,
    p,
    noise,
    position,
    bits_at,
    ids_at,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    cut_bits = tl.full([], LARGEST, tl.int32)
    cut_id = tl.full([], VOCAB, tl.int32)
    if k > 0:
        cut_bits, cut_id = cut_count(logits, peaks, most, heat, reach, k, bits_at, ids_at, VOCAB, TILE, TILES, CAPACITY, ID_BITS)
    goal = tl.full([], 1, tl.int64)
    if p < 1:
        total, _ = weigh_row(logits, most, heat, reach, cut_bits, cut_id, 0, VOCAB, TILE, TILES)
        goal = mass_goal(p, total)
    winner = tl.full([], -1, tl.int32)
    low = tl.full([], 0, tl.int32)  # bits with less than the goal before them
    while winner < 0:
        found = race_row(logits, most, heat, reach, cut_bits, cut_id, noise, position, VOCAB, TILE, TILES)
        cut_bits = distance_bits(most, read(logits, found, VOCAB), heat)
        cut_id = found - 1
        before = tl.full([], 0, tl.int64)
        if p < 1:
            middle = low + (cut_bits - low + 1) // 2
            before, nearer = weigh_row(logits, most, heat, reach, cut_bits, cut_id, middle, VOCAB, TILE, TILES)
            low = tl.where(nearer < goal, middle, low)
            cut_id = tl.where(nearer < goal, cut_id, VOCAB)
            cut_bits = tl.where(nearer < goal, cut_bits, middle - 1)
        winner = tl.where(before < goal, found, winner)
    return winner


@triton.jit
def winning_pick(logits, known, most, heat, reach, p, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """The id of the pick that is sampled; -1 if it is none of them. Totals that were not computed for all tiles are computed here."""
    goal = mass_goal(p, tl.load(known + TOTAL))
    place = fitting(known, goal)
    found = place < AT_ONCE
    pick = tl.load(known + PICK + place)
    while (pick >= 0) & (place < PICKS) & (found == 0):
        before, _ = weigh_row(logits, most, heat, reach, (pick >> 32).to(tl.int32), pick.to(tl.int32) - 1, 0, VOCAB, TILE, TILES)
        found = before < goal
        if before >= goal:
            place += 1
            pick = tl.load(known + PICK + place, mask=place < PICKS, other=-1)
    return tl.where(found & (pick >= 0), pick, -1).to(tl.int32)


@triton.jit
def draw_fallback(
    logits,
    peaks,
    known,
    member_bits,
    member_ids,
    out,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    known += row * KNOWN
    state = tl.load(known + STATE)
    if state != SETTLED:
        logits += row * STRIDE
        k, p, reach = integer(known + K), number(known + TOP_P), integer(known + REACH)
        most, heat = number(known + MOST), number(known + HEAT)
        winner = tl.full([], -1, tl.int32)
        if state == RACED:
            winner = winning_pick(logits, known, most, heat, reach, p, VOCAB, TILE, TILES)
        if winner < 0:
            winner = search_row(
                logits, peaks + row * TILES, most, heat, reach, k, p, known + NOISE, tl.load(known + POSITION).to(tl.uint32),
                member_bits + row * CAPACITY, member_ids + row * CAPACITY, VOCAB, TILE, TILES, CAPACITY, ID_BITS,
            )  # fmt: skip
        tl.store(out + row, winner.to(tl.int64))
