"""Drawing one id a row over what min-p, top-k and top-p leave, without ordering the row.

    find_tops    the largest logit of every 64 tokens                                                              one pass
    survey       the mass of the row; with top-k, the k-th smallest of the groups' least distances: k tokens are so near   one pass
    gather       members: with top-k all tokens as near as that, else those that may come first in the race        one pass
    settle       cuts the members by halving over bits, then over ids, and races them. Without top-k, the race is among the
                 members alone, too; top-p comes after it: `known.py`
    weigh        the mass before the picks of a row with top-p; the second time those rows that none of the first fits   one pass
    search       rows with more than CAPACITY members, or whose picks all lie beyond the cut: `search.py`

A token with mass m of a total Z beats a score of log(Z / RACERS) only if its noise, uniform in (0, 1), is nearer to 1 than
RACERS * m / Z. That many tokens of a row do, about; of the others no logarithm is taken.

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
    RUNTIME,
    TILE,
    UNALIGNED,
    cut_of,
    distance_bits,
    find_tops,
    highest,
    last_within,
    load_filters,
    mass,
    mass_goal,
    passes,
    read,
    warmth,
    within,
)
from octavo.kernels.triton.known import AT_ONCE, BEFORE, COUNT, HIGH, KNOWN, PICK, PICKS, RACED, SETTLED, STATE, TOTAL, fitting
from octavo.kernels.triton.sampling import gumbel, uniform, uniform_at
from octavo.kernels.triton.search import search

RACERS = tl.constexpr(128.0)
SLACK = tl.constexpr(1.001)  # who might race is told with less care than scores are


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def survey(
    logits,
    tops,
    peaks,
    known,
    temperature,
    top_k,
    top_p,
    min_p,
    step,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, _, floor = load_filters(top_k, top_p, min_p, row * step, VOCAB)
    known += row * KNOWN
    if (k == 0) | (tile == 0):
        heat = warmth(temperature + row * step)
        most = highest(peaks + row * TILES, TILES, PADDED_TILES)
        if k == 0:
            token = tile * TILE + tl.arange(0, TILE)
            masses = mass(distance_bits(most, read(logits + row * STRIDE, token, VOCAB), heat))
            tl.atomic_add(known + TOTAL, tl.sum(tl.where(masses >= floor, masses, 0), 0), sem="relaxed")
        else:
            high = tl.full([], LARGEST, tl.int32)
            if k <= GROUPS:
                group = tl.arange(0, PADDED_GROUPS)
                top = tl.load(tops + row * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
                least = tl.where(group < GROUPS, distance_bits(most, top, heat), LARGEST)  # the bits of each group's best
                high = last_within(least, (group < GROUPS).to(tl.int32), k, KEY_BITS)
            tl.store(known + HIGH, high.to(tl.int64))
            if (high == LARGEST) & (VOCAB > CAPACITY):
                tl.store(known + COUNT, tl.full([], CAPACITY + 1, tl.int64))  # nobody has to count them


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def gather(
    logits,
    peaks,
    known,
    temperature,
    top_k,
    top_p,
    min_p,
    noise,
    positions,
    member_bits,
    member_ids,
    step,
    noise_step,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Members come in any order, and nothing depends on it. What lies infinitely far is none: it cannot win."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, _, floor = load_filters(top_k, top_p, min_p, row * step, VOCAB)
    heat = warmth(temperature + row * step)
    most = highest(peaks + row * TILES, TILES, PADDED_TILES)
    known += row * KNOWN
    high = tl.where(k > 0, tl.load(known + HIGH).to(tl.int32), INFINITE)
    nearest = distance_bits(most, tl.load(peaks + row * TILES + tile), heat)
    if (nearest <= high) & (tl.load(known + COUNT) <= CAPACITY) & passes(nearest, floor):
        token = tile * TILE + tl.arange(0, TILE)
        bits = distance_bits(most, read(logits + row * STRIDE, token, VOCAB), heat)
        inside = (bits < INFINITE) & passes(bits, floor)
        counter = known + COUNT
        if k > 0:
            order = tl.cumsum((inside & (bits == high)).to(tl.int32), 0)
            inside = inside & ((bits < high) | ((bits == high) & (order <= k)))
            start = tl.atomic_add(counter, tl.sum(inside.to(tl.int64), 0), sem="relaxed").to(tl.int32)
            place = start + tl.cumsum(inside.to(tl.int32), 0) - 1
        else:  # so few that each may ask for its place
            share = RACERS * SLACK * ONE / tl.load(known + TOTAL).to(tl.float32)
            quad = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)
            unit = uniform(noise + row * noise_step, tl.load(positions + row).to(tl.uint32), quad, TILE)
            inside = inside & (1.0 - unit <= tl.exp(-bits.to(tl.float32, bitcast=True)) * share)
            place = tl.atomic_add(counter + tl.zeros_like(token), tl.full([TILE], 1, tl.int64), mask=inside, sem="relaxed").to(tl.int32)
        fits = inside & (place < CAPACITY)
        tl.store(member_bits + row * CAPACITY + place, bits, mask=fits)
        tl.store(member_ids + row * CAPACITY + place, token, mask=fits)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def settle(
    known,
    top_k,
    top_p,
    min_p,
    noise,
    positions,
    member_bits,
    member_ids,
    out,
    step,
    noise_step,
    VOCAB: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k, p, _ = load_filters(top_k, top_p, min_p, row * step, VOCAB)
    known += row * KNOWN
    count = tl.load(known + COUNT).to(tl.int32)
    if (count > 0) & (count <= CAPACITY):
        slot = tl.arange(0, CAPACITY)
        kept = slot < count
        bits = tl.load(member_bits + row * CAPACITY + slot, mask=kept, other=LARGEST)
        ids = tl.load(member_ids + row * CAPACITY + slot, mask=kept, other=VOCAB)
        score = gumbel(uniform_at(noise + row * noise_step, tl.load(positions + row).to(tl.uint32), ids))
        score -= bits.to(tl.float32, bitcast=True)
        if k > 0:
            last, last_id = cut_of(bits, ids, kept.to(tl.int32), k, ID_BITS)
            kept = kept & within(bits, ids, last, last_id)
            if p < 1:
                masses = tl.where(kept, mass(bits), 0)
                last, last_id = cut_of(tl.where(kept, bits, LARGEST), ids, masses, mass_goal(p, tl.sum(masses, 0)), ID_BITS)
                kept = kept & within(bits, ids, last, last_id)
        else:  # below this not all who race are members
            kept = kept & (score >= tl.log(tl.load(known + TOTAL).to(tl.float32) / (RACERS * ONE)))
        picks = tl.where((k == 0) & (p < 1), PICKS, 1)
        for place in range(picks):
            best = tl.max(tl.where(kept, score, float("-inf")), 0)
            chosen = tl.min(tl.where(kept & (score == best), ids, VOCAB), 0)
            chosen_bits = tl.max(tl.where(kept & (ids == chosen), bits, -1), 0)
            pick = (chosen_bits.to(tl.int64) << 32) | chosen
            tl.store(known + PICK + place, tl.where(chosen < VOCAB, pick, -1))
            kept = kept & within(bits, ids, chosen_bits, chosen - 1)
            if (picks == 1) & (chosen < VOCAB):
                tl.store(out + row, chosen.to(tl.int64))
                tl.store(known + STATE, tl.full([], SETTLED, tl.int64))
        if picks > 1:
            tl.store(known + STATE, tl.full([], RACED, tl.int64))


@triton.jit(do_not_specialize=[*RUNTIME, "weighed"], do_not_specialize_on_alignment=UNALIGNED)
def weigh(
    logits,
    peaks,
    known,
    temperature,
    top_k,
    top_p,
    min_p,
    step,
    weighed,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
):
    """`weighed`: how many picks are, already."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    known += row * KNOWN
    if tl.load(known + STATE) == RACED:
        _, p, floor = load_filters(top_k, top_p, min_p, row * step, VOCAB)
        if fitting(known, mass_goal(p, tl.load(known + TOTAL)), weighed) == PICKS:
            token = tile * TILE + tl.arange(0, TILE)
            most = highest(peaks + row * TILES, TILES, PADDED_TILES)
            bits = distance_bits(most, read(logits + row * STRIDE, token, VOCAB), warmth(temperature + row * step))
            masses = mass(bits)
            masses = tl.where(masses >= floor, masses, 0)
            key = (bits.to(tl.int64) << 32) | token
            for place in tl.static_range(AT_ONCE):
                at = known + weighed + place
                before = tl.sum(tl.where(key < tl.load(at + PICK), masses, 0), 0)
                tl.atomic_add(at + BEFORE, before, sem="relaxed")


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """One id a row. logits: [S, V]; returns [S] int64"""
    rows, vocab = logits.shape
    step, noise_step = draws.temperature.stride(0), draws.noise.stride(0)
    assert logits.stride(1) == 1 and draws.noise.stride(1) == 1 and draws.positions.is_contiguous()
    assert {draws.top_k.stride(0), draws.top_p.stride(0), draws.min_p.stride(0)} == {step}
    tiles, device = triton.cdiv(vocab, TILE), logits.device
    groups = tiles * (TILE // GROUP)
    tops, peaks = (torch.empty(rows, width, device=device) for width in (groups, tiles))
    known, out = torch.zeros(rows, KNOWN.value, dtype=torch.int64, device=device), torch.empty(rows, dtype=torch.int64, device=device)
    members = torch.empty(2, rows, CAPACITY, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    limits = draws.top_k, draws.top_p, draws.min_p
    filters, racing = (draws.temperature, *limits), (draws.noise, draws.positions, *members)
    shape = {"VOCAB": vocab, "STRIDE": logits.stride(0), "TILE": TILE}
    across = {"TILES": tiles, "PADDED_TILES": triton.next_power_of_2(tiles)}
    by_group = {"GROUPS": groups, "PADDED_GROUPS": triton.next_power_of_2(groups)}
    cutting = {"CAPACITY": CAPACITY, "ID_BITS": vocab.bit_length()}
    find_tops[(rows, tiles)](logits, tops, peaks, **shape, GROUP=GROUP, num_warps=4)
    survey[(rows, tiles)](logits, tops, peaks, known, *filters, step, **shape, **across, **by_group, CAPACITY=CAPACITY, num_warps=4)
    gather[(rows, tiles)](logits, peaks, known, *filters, *racing, step, noise_step, **shape, **across, CAPACITY=CAPACITY, num_warps=4)
    settle[(rows,)](known, *limits, *racing, out, step, noise_step, VOCAB=vocab, **cutting, num_warps=16)
    for weighed in range(0, PICKS.value, AT_ONCE.value):
        weigh[(rows, tiles)](logits, peaks, known, *filters, step, weighed, **shape, **across, num_warps=4)
    search[(rows,)](logits, peaks, known, *filters, *racing, out, step, noise_step, **shape, **across, **cutting, num_warps=16)
    return out
