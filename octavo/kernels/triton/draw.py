"""Drawing one id a row over what min-p, top-k and top-p leave, without ordering the row.

    find_tops    the largest logit of every 64 tokens                     one pass
    sum_masses   the mass of the row, where top-p needs it                one pass
    settle       k groups have a token up to the k-th smallest of their least distances, so the first k tokens lie up to there;
                 the same with masses for top-p. Those few tokens are collected, cut by halving over bits, then over ids, and raced
    search       rows with more than CAPACITY such tokens, or none known (flat ones, large k). The k-th token is found by quartering
                 bits. For top-p the race comes first: if its winner has too much mass before it, so has all behind it, and the
                 next race is among those before. Each race also halves the bits where the cut can lie, so that there are few
    race         rows without top-k and top-p: noise for every token that min-p leaves

The result is that of `kernels/reference/sampling.py` (order (distance, id), equal scores to the lower id) but where two scores, or a
mass and a cut, are closer than float32 logarithms and exponentials tell.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.sampling import Draws
from octavo.kernels.triton.distances import (
    CAPACITY,
    GROUP,
    INFINITE,
    KEY_BITS,
    LARGEST,
    ONE,
    TILE,
    collect,
    cut_of,
    distance_bits,
    find_tops,
    highest,
    last_within,
    mass,
    mass_goal,
    passes,
    read,
    row_total,
    warmth,
    within,
)
from octavo.kernels.triton.sampling import gumbel, uniform, uniform_at

SETTLED, OPEN, FREE = map(tl.constexpr, range(3))  # the id is known; it is to be searched; no top-k or top-p
PIVOT_1, PIVOT_2, PIVOT_3 = tl.constexpr(0x40000000), tl.constexpr(0x40C00000), tl.constexpr(0x41800000)  # distances 2, 6, 16
UNALIGNED = ["temperature", "top_k", "top_p", "min_p", "noise", "positions"]  # views of one line may start anywhere
RUNTIME = ["step", "noise_step"]


@triton.jit
def load_filters(top_k, top_p, min_p, at, VOCAB: tl.constexpr):
    """k, or 0 where it is off; top_p; the least mass that min-p lets pass."""
    k = tl.load(top_k + at).to(tl.int32)
    floor = (tl.load(min_p + at).to(tl.float64) * ONE).to(tl.int64)
    return tl.where(k < VOCAB, k, 0), tl.load(top_p + at), floor


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def sum_masses(
    logits,
    peaks,
    temperature,
    top_k,
    top_p,
    min_p,
    sums,
    step,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, p, floor = load_filters(top_k, top_p, min_p, row * step, VOCAB)
    if (k == 0) & (p < 1):
        token = tile * TILE + tl.arange(0, TILE)
        most = highest(peaks + row * TILES, TILES, PADDED_TILES)
        masses = mass(distance_bits(most, read(logits + row * STRIDE, token, VOCAB), warmth(temperature + row * step)))
        tl.store(sums + row * TILES + tile, tl.sum(tl.where((token < VOCAB) & (masses >= floor), masses, 0), 0))


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def settle(
    logits,
    tops,
    peaks,
    sums,
    temperature,
    top_k,
    top_p,
    min_p,
    noise,
    positions,
    member_bits,
    member_ids,
    states,
    out,
    step,
    noise_step,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k, p, floor = load_filters(top_k, top_p, min_p, row * step, VOCAB)
    heat = warmth(temperature + row * step)
    group = tl.arange(0, PADDED_GROUPS)
    top = tl.load(tops + row * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
    most = tl.max(top, 0)
    least = tl.where(group < GROUPS, distance_bits(most, top, heat), LARGEST)  # the bits of each group's best
    total = tl.full([], 0, tl.int64)
    high = tl.full([], LARGEST, tl.int32)
    filtered = (k > 0) | (p < 1)
    if k > 0:
        if k <= GROUPS:
            high = last_within(least, (group < GROUPS).to(tl.int32), k, KEY_BITS)
    elif p < 1:
        total = row_total(sums + row * TILES, TILES, PADDED_TILES)
        masses = mass(least)
        high = last_within(least, tl.where((group < GROUPS) & (masses >= floor), masses, 0), mass_goal(p, total), KEY_BITS)
    bits_at, ids_at = member_bits + row * CAPACITY, member_ids + row * CAPACITY
    count = tl.full([], CAPACITY + 1, tl.int32)
    if (high < LARGEST) | (filtered & (VOCAB <= CAPACITY)) | ((k == 0) & (p >= 1) & (floor > 0)):
        ties = tl.where(k > 0, k, VOCAB)
        count = collect(
            logits + row * STRIDE, peaks + row * TILES, most, heat, floor, 0, high, ties, bits_at, ids_at, VOCAB, TILE, TILES, CAPACITY
        )
    if count <= CAPACITY:
        slot = tl.arange(0, CAPACITY)
        kept = slot < count
        bits = tl.load(bits_at + slot, mask=kept, other=LARGEST)
        ids = tl.load(ids_at + slot, mask=kept, other=VOCAB)
        if k > 0:
            last, last_id = cut_of(bits, ids, kept.to(tl.int32), k, ID_BITS)
            kept = kept & within(bits, ids, last, last_id)
        if p < 1:
            masses = tl.where(kept, mass(bits), 0)
            total = tl.where(k > 0, tl.sum(masses, 0), total)
            last, last_id = cut_of(tl.where(kept, bits, LARGEST), ids, masses, mass_goal(p, total), ID_BITS)
            kept = kept & within(bits, ids, last, last_id)
        position = tl.load(positions + row).to(tl.uint32)
        score = gumbel(uniform_at(noise + row * noise_step, position, ids)) - bits.to(tl.float32, bitcast=True)
        score = tl.where(kept, score, float("-inf"))
        winner = tl.min(tl.where(kept & (score == tl.max(score, 0)), ids, VOCAB - 1), 0)
        tl.store(out + row, winner.to(tl.int64))
        tl.store(states + row, SETTLED)
    else:
        tl.store(states + row, tl.where(filtered, OPEN, FREE))


@triton.jit
def race_row(
    logits,
    most,
    heat,
    floor,
    cut_bits,
    cut_id,
    noise,
    position,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The token within a cut with the highest score."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    owner = tl.zeros([TILE], tl.int32)
    for tile in range(TILES):
        token = tile * TILE + tl.arange(0, TILE)
        bits = distance_bits(most, read(logits, token, VOCAB), heat)
        kept = (token < VOCAB) & within(bits, token, cut_bits, cut_id) & passes(bits, floor)
        quad = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)
        score = gumbel(uniform(noise, position, quad, TILE)) - bits.to(tl.float32, bitcast=True)
        better = kept & (score > best)
        owner = tl.where(better, token, owner)
        best = tl.where(better, score, best)
    return tl.min(tl.where(best == tl.max(best, 0), owner, VOCAB - 1), 0)


@triton.jit
def weigh(logits, most, heat, floor, cut_bits, cut_id, middle, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """The mass within a cut, and that part of it whose bits are below `middle`."""
    total = tl.zeros([TILE], tl.int64)
    nearer = tl.zeros([TILE], tl.int64)
    for tile in range(TILES):
        token = tile * TILE + tl.arange(0, TILE)
        bits = distance_bits(most, read(logits, token, VOCAB), heat)
        masses = mass(bits)
        masses = tl.where((token < VOCAB) & (masses >= floor) & within(bits, token, cut_bits, cut_id), masses, 0)
        total += masses
        nearer += tl.where(bits < middle, masses, 0)
    return tl.sum(total, 0), tl.sum(nearer, 0)


@triton.jit
def count_below(logits, most, heat, floor, first, second, third, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """How many tokens have bits below each of three."""
    below_1 = tl.zeros([TILE], tl.int32)
    below_2 = tl.zeros([TILE], tl.int32)
    below_3 = tl.zeros([TILE], tl.int32)
    for tile in range(TILES):
        token = tile * TILE + tl.arange(0, TILE)
        bits = distance_bits(most, read(logits, token, VOCAB), heat)
        bits = tl.where((token < VOCAB) & passes(bits, floor), bits, LARGEST)
        below_1 += (bits < first).to(tl.int32)
        below_2 += (bits < second).to(tl.int32)
        below_3 += (bits < third).to(tl.int32)
    return tl.sum(below_1, 0), tl.sum(below_2, 0), tl.sum(below_3, 0)


@triton.jit
def nth_equal(logits, most, heat, wanted, nth, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """The nth token, by its id, with the bits `wanted`; VOCAB where there are fewer."""
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
    floor,
    k,
    bits_at,
    ids_at,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    """(bits, id) of the k-th token: the bits between which it lies are quartered until what lies between them fits."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], INFINITE, tl.int32)
    below = tl.full([], 0, tl.int32)  # how many come before `low`
    first = tl.full([], PIVOT_1, tl.int32)
    second = tl.full([], PIVOT_2, tl.int32)
    third = tl.full([], PIVOT_3, tl.int32)
    count = tl.full([], CAPACITY + 1, tl.int32)
    while (count > CAPACITY) & (low < high):
        for _ in range(2):
            a, b, c = count_below(logits, most, heat, floor, first, second, third, VOCAB, TILE, TILES)
            high = tl.minimum(high, tl.where(a >= k, first, tl.where(b >= k, second, tl.where(c >= k, third, LARGEST))) - 1)
            below = tl.where(c < k, c, tl.where(b < k, b, tl.where(a < k, a, below)))
            low = tl.minimum(tl.where(c < k, third, tl.where(b < k, second, tl.where(a < k, first, low))), high)
            quarter = (high - low) // 4 + 1
            first = low + quarter
            second = first + quarter
            third = second + quarter
        count = collect(logits, peaks, most, heat, floor, low, high, VOCAB, bits_at, ids_at, VOCAB, TILE, TILES, CAPACITY)
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


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def search(
    logits,
    peaks,
    sums,
    temperature,
    top_k,
    top_p,
    min_p,
    noise,
    positions,
    member_bits,
    member_ids,
    states,
    out,
    step,
    noise_step,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(states + row) == OPEN:
        k, p, floor = load_filters(top_k, top_p, min_p, row * step, VOCAB)
        heat = warmth(temperature + row * step)
        most = highest(peaks + row * TILES, TILES, PADDED_TILES)
        logits += row * STRIDE
        position = tl.load(positions + row).to(tl.uint32)
        cut_bits = tl.full([], LARGEST, tl.int32)
        cut_id = tl.full([], VOCAB, tl.int32)
        if k > 0:
            bits_at, ids_at = member_bits + row * CAPACITY, member_ids + row * CAPACITY
            cut_bits, cut_id = cut_count(
                logits, peaks + row * TILES, most, heat, floor, k, bits_at, ids_at, VOCAB, TILE, TILES, CAPACITY, ID_BITS
            )
        goal = tl.full([], 1, tl.int64)
        if p < 1:
            if k > 0:
                total, _ = weigh(logits, most, heat, floor, cut_bits, cut_id, 0, VOCAB, TILE, TILES)
            else:
                total = row_total(sums + row * TILES, TILES, PADDED_TILES)
            goal = mass_goal(p, total)
        winner = tl.full([], -1, tl.int32)
        low = tl.full([], 0, tl.int32)  # bits with less than the goal before them
        while winner < 0:
            found = race_row(logits, most, heat, floor, cut_bits, cut_id, noise + row * noise_step, position, VOCAB, TILE, TILES)
            cut_bits = distance_bits(most, read(logits, found, VOCAB), heat)
            cut_id = found - 1
            before = tl.full([], 0, tl.int64)
            if p < 1:
                middle = low + (cut_bits - low + 1) // 2
                before, nearer = weigh(logits, most, heat, floor, cut_bits, cut_id, middle, VOCAB, TILE, TILES)
                low = tl.where(nearer < goal, middle, low)
                cut_id = tl.where(nearer < goal, cut_id, VOCAB)
                cut_bits = tl.where(nearer < goal, cut_bits, middle - 1)
            winner = tl.where(before < goal, found, winner)
        tl.store(out + row, winner.to(tl.int64))


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def race(
    logits,
    peaks,
    temperature,
    min_p,
    noise,
    positions,
    states,
    scores,
    ids,
    step,
    noise_step,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(states + row) == FREE:
        token = tile * TILE + tl.arange(0, TILE)
        most = highest(peaks + row * TILES, TILES, PADDED_TILES)
        bits = distance_bits(most, read(logits + row * STRIDE, token, VOCAB), warmth(temperature + row * step))
        floor = (tl.load(min_p + row * step).to(tl.float64) * ONE).to(tl.int64)
        kept = (token < VOCAB) & passes(bits, floor)
        quad = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)
        position = tl.load(positions + row).to(tl.uint32)
        score = gumbel(uniform(noise + row * noise_step, position, quad, TILE)) - bits.to(tl.float32, bitcast=True)
        best, index = tl.max(tl.where(kept, score, float("-inf")), 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(scores + row * TILES + tile, best)
        tl.store(ids + row * TILES + tile, tl.minimum(tile * TILE + index, VOCAB - 1))


@triton.jit
def finish(states, scores, ids, out, TILES: tl.constexpr, PADDED_TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(states + row) == FREE:
        tile = tl.arange(0, PADDED_TILES)
        score = tl.load(scores + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
        winner = tl.minimum(tl.argmax(score, 0, tie_break_left=True), TILES - 1)
        tl.store(out + row, tl.load(ids + row * TILES + winner).to(tl.int64))


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """One id a row. logits: [S, V]; returns [S] int64"""
    rows, vocab = logits.shape
    step, noise_step = draws.temperature.stride(0), draws.noise.stride(0)
    assert logits.stride(1) == 1 and draws.noise.stride(1) == 1 and draws.positions.is_contiguous()
    assert {draws.top_k.stride(0), draws.top_p.stride(0), draws.min_p.stride(0)} == {step}
    tiles, device = triton.cdiv(vocab, TILE), logits.device
    groups, padded = tiles * (TILE // GROUP), triton.next_power_of_2(tiles)
    tops, peaks = (torch.empty(rows, width, device=device) for width in (groups, tiles))
    sums, out = torch.empty(rows, tiles, dtype=torch.int64, device=device), torch.empty(rows, dtype=torch.int64, device=device)
    member_bits, member_ids = torch.empty(2, rows, CAPACITY, dtype=torch.int32, device=device)
    states = torch.empty(rows, dtype=torch.int32, device=device)
    scores, ids = torch.empty(rows, tiles, device=device), torch.empty(rows, tiles, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    filters = draws.temperature, draws.top_k, draws.top_p, draws.min_p
    shape = {"VOCAB": vocab, "STRIDE": logits.stride(0), "TILE": TILE}
    across = {"TILES": tiles, "PADDED_TILES": padded}
    cutting = {"CAPACITY": CAPACITY, "ID_BITS": vocab.bit_length()}
    find_tops[(rows, tiles)](logits, tops, peaks, **shape, GROUP=GROUP, num_warps=4)
    sum_masses[(rows, tiles)](logits, peaks, *filters, sums, step, **shape, **across, num_warps=4)
    settle[(rows,)](
        logits, tops, peaks, sums, *filters, draws.noise, draws.positions, member_bits, member_ids, states, out, step, noise_step,
        **shape, **across, **cutting, GROUPS=groups, PADDED_GROUPS=triton.next_power_of_2(groups), num_warps=16,
    )  # fmt: skip
    search[(rows,)](
        logits, peaks, sums, *filters, draws.noise, draws.positions, member_bits, member_ids, states, out, step, noise_step,
        **shape, **across, **cutting, num_warps=16,
    )  # fmt: skip
    race[(rows, tiles)](
        logits, peaks, draws.temperature, draws.min_p, draws.noise, draws.positions, states, scores, ids, step, noise_step,
        **shape, **across, num_warps=4,
    )  # fmt: skip
    finish[(rows,)](states, scores, ids, out, **across, num_warps=1)
    return out
