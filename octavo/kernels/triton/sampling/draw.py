"""Samples one id per row among the tokens that pass min-p, top-k and top-p, without sorting the row.

    find_tops    the largest logit of every 64 tokens                                                              one pass
    survey       bounds for a row, from those: `draw_state.py`. With top-k, the k-th smallest of the groups' minimum
                 distances: at least k tokens are within it. Otherwise the smallest probability that could still win
    gather       members: with top-k all tokens within that bound, otherwise those that may win the race           one pass
    settle       finds the cutoff among the members by bisection over bits, then ids, and races them. Without top-k, top-p comes later
    weigh        the total probability of a row with top-p, and the part of it before its first picks              one pass
    draw_fallback  rows with more than CAPACITY members, or whose first picks are all beyond the cutoff (`draw_fallback.py`)

A token with probability m scores -log(SHARE) or more if -log(u) <= SHARE * m, where u is its noise in (0, 1): then 1 - u is not larger
either, which needs no logarithm. With SHARE = RACERS / Z, RACERS tokens do. Z is a lower bound of the row's total, divided by top-p.

The result equals that of `kernels/reference/sampling.py` (order (distance, id), equal scores to the lower id), unless two scores, or a
probability and a cutoff, are closer than the precision of float32 logarithms and exponentials.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.sampling import Draws
from octavo.kernels.triton.sampling.distances import (
    CAPACITY,
    GROUP,
    HUGE,
    INFINITE,
    KEY_BITS,
    LARGEST,
    LOG2_E,
    ONE,
    RUNTIME,
    TILE,
    UNALIGNED,
    cut_of,
    distance_bits,
    find_tops,
    furthest,
    last_within,
    mass,
    mass_goal,
    mass_parts,
    read,
    warmth,
    within,
)
from octavo.kernels.triton.sampling.draw_fallback import draw_fallback
from octavo.kernels.triton.sampling.draw_state import (
    AT_ONCE,
    BEFORE,
    COUNT,
    HEAT,
    HIGH,
    KNOWN,
    LOWEST,
    MOST,
    NOISE,
    PICK,
    PICKS,
    POSITION,
    RACED,
    REACH,
    SETTLED,
    SHARE,
    STATE,
    TOP_P,
    TOTAL,
    K,
    integer,
    keep,
    number,
)
from octavo.kernels.triton.sampling.sample import gumbel, tile_words, uniform_at

RACERS = tl.constexpr(16.0)  # expected number of racers: in one row of ten million there is none
MOST_RACERS = tl.constexpr(256.0)
SLACK = tl.constexpr(1.001)  # candidate selection uses a looser bound than the scores
ALMOST_2 = tl.constexpr(2 - 2.0**-23)
FEW = 512  # most rows have at most this many members
SUMMED = tl.constexpr(8)  # mass_parts added at once


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the kernels that read whole rows divide them."""

    tile: int = TILE
    programs: int = 2048  # approximate number per kernel; each processes every n-th tile of a row
    survey_warps: int = 8
    gather_warps: int = 4
    weigh_warps: int = 4


TILING = Tiling()


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def survey(
    tops,
    known,
    temperature,
    top_k,
    top_p,
    min_p,
    noise,
    positions,
    step,
    noise_step,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    known += row * KNOWN
    heat = warmth(temperature + row * step)
    k, p = tl.load(top_k + row * step).to(tl.int32), tl.load(top_p + row * step)
    k = tl.where(k < VOCAB, k, 0)
    reach = furthest((tl.load(min_p + row * step).to(tl.float64) * ONE).to(tl.int64))
    group = tl.arange(0, PADDED_GROUPS)
    top = tl.load(tops + row * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
    most = tl.max(top, 0)
    least = tl.where(group < GROUPS, distance_bits(most, top, heat), LARGEST)  # the bits of each group's best
    high = tl.full([], LARGEST, tl.int32)
    count = tl.full([], 0, tl.int64)
    share = tl.full([], 0.0, tl.float32)
    if k > 0:
        if k <= GROUPS:
            high = last_within(least, (group < GROUPS).to(tl.int32), k, KEY_BITS)
        if (high == LARGEST) & (VOCAB > CAPACITY):
            count += CAPACITY + 1  # no need to count them
    else:
        nearest = tl.where(least <= tl.minimum(reach, INFINITE), tl.exp2(least.to(tl.float32, bitcast=True) * -LOG2_E), 0.0)
        share = tl.minimum(RACERS / tl.minimum(p, 1.0), MOST_RACERS) / tl.sum(nearest, 0)
    far = tl.minimum(tl.minimum(high, reach), INFINITE).to(tl.float32, bitcast=True)
    keep(known + LOWEST, tl.maximum(most - far * heat * SLACK, -HUGE))
    keep(known + SHARE, share)
    keep(known + TOP_P, p)
    keep(known + HEAT, heat)
    keep(known + MOST, most)
    tl.store(known + K, k.to(tl.int64))
    tl.store(known + REACH, reach.to(tl.int64))
    tl.store(known + HIGH, high.to(tl.int64))
    tl.store(known + COUNT, count)
    tl.store(known + STATE, tl.full([], 0, tl.int64))
    tl.store(known + TOTAL, tl.full([], 0, tl.int64))
    tl.store(known + BEFORE + tl.arange(0, PICKS), tl.zeros([PICKS], tl.int64))
    word = tl.arange(0, 4)
    tl.store(known + NOISE + word, tl.load(noise + row * noise_step + word).to(tl.int64))
    tl.store(known + POSITION, tl.load(positions + row).to(tl.int64))


@triton.jit
def write_members(inside, token, counter, member_ids, CAPACITY: tl.constexpr):
    """There are so few members that each reserves its place with an atomic."""
    one = inside.to(tl.int64)
    place = tl.atomic_add(counter + tl.zeros_like(token), one, mask=inside, sem="relaxed").to(tl.int32)
    tl.store(member_ids + place, token, mask=inside & (place < CAPACITY))


@triton.jit
def gather(
    logits,
    peaks,
    known,
    member_ids,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Members are in no particular order, and nothing depends on it. A few of them are removed by `settle`."""
    row = tl.program_id(0).to(tl.int64)
    known += row * KNOWN
    member_ids += row * CAPACITY
    if tl.load(known + COUNT) <= CAPACITY:
        k, high, position = integer(known + K), integer(known + HIGH), tl.load(known + POSITION).to(tl.uint32)
        lowest, most, heat, share = number(known + LOWEST), number(known + MOST), number(known + HEAT), number(known + SHARE) * SLACK
        steepness = LOG2_E / heat
        for tile in range(tl.program_id(1), TILES, tl.num_programs(1)):
            if tl.load(peaks + row * TILES + tile) >= lowest:
                token = tile * TILE + tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # in the order of the noise
                logit = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
                if k == 0:
                                        # 1 + u, less half a step of the noise, is compared with 2 - SHARE * m, less a whole step
                    noisy = ((tile_words(known + NOISE, position, tile, TILE) >> 9) + 0x3F800000).to(tl.float32, bitcast=True)
                    races = noisy >= ALMOST_2 - tl.exp2((logit - most) * steepness) * share
                    if tl.max(tl.max(races.to(tl.int32), 1), 0) > 0:
                        write_members(races & (logit >= lowest), token, known + COUNT, member_ids, CAPACITY)
                else:
                    inside = logit >= lowest
                    count = tl.sum(tl.sum(inside.to(tl.int32), 1), 0)
                    if count > k:  # in a tie, k are enough
                        bits = distance_bits(most, logit, heat)
                        nth = tl.cumsum((bits == high).to(tl.int32).reshape(TILE), 0).reshape(TILE // 4, 4)
                        inside = inside & ((bits < high) | ((bits == high) & (nth <= k)))
                    if count > 0:
                        write_members(inside, token, known + COUNT, member_ids, CAPACITY)


@triton.jit
def settle_among(logits, known, member_ids, out, count, WIDTH: tl.constexpr, VOCAB: tl.constexpr, ID_BITS: tl.constexpr):
    k, p = integer(known + K), number(known + TOP_P)
    slot = tl.arange(0, WIDTH)
    ids = tl.load(member_ids + slot, mask=slot < count, other=VOCAB)
    bits = distance_bits(number(known + MOST), read(logits, ids, VOCAB), number(known + HEAT))
    kept = (slot < count) & (bits < INFINITE) & (bits <= integer(known + REACH))
    bits = tl.where(kept, bits, LARGEST)
    score = gumbel(uniform_at(known + NOISE, tl.load(known + POSITION).to(tl.uint32), ids)) - bits.to(tl.float32, bitcast=True)
    if k > 0:
        last, last_id = cut_of(bits, ids, kept.to(tl.int32), k, ID_BITS)
        kept = kept & within(bits, ids, last, last_id)
        if p < 1:
            masses = tl.where(kept, mass(bits), 0)
            last, last_id = cut_of(tl.where(kept, bits, LARGEST), ids, masses, mass_goal(p, tl.sum(masses, 0)), ID_BITS)
            kept = kept & within(bits, ids, last, last_id)
    else:  # below this bound not all tokens are members
        kept = kept & (score >= -tl.log(number(known + SHARE)))
    picks = tl.where((k == 0) & (p < 1), PICKS, 1)
    for place in range(picks):
        best = tl.max(tl.where(kept, score, float("-inf")), 0)
        chosen = tl.min(tl.where(kept & (score == best), ids, VOCAB), 0)
        chosen_bits = tl.max(tl.where(kept & (ids == chosen), bits, -1), 0)
        pick = (chosen_bits.to(tl.int64) << 32) | chosen
        tl.store(known + PICK + place, tl.where(chosen < VOCAB, pick, -1))
        kept = kept & within(bits, ids, chosen_bits, chosen - 1)
        if (picks == 1) & (chosen < VOCAB):
            tl.store(out, chosen.to(tl.int64))
            tl.store(known + STATE, tl.full([], SETTLED, tl.int64))
    if picks > 1:
        tl.store(known + STATE, tl.full([], RACED, tl.int64))


@triton.jit
def settle(
    logits,
    known,
    member_ids,
    out,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * STRIDE
    known += row * KNOWN
    member_ids += row * CAPACITY
    count = integer(known + COUNT)
    if (count > 0) & (count <= FEW):
        settle_among(logits, known, member_ids, out + row, count, FEW, VOCAB, ID_BITS)
    if (count > FEW) & (count <= CAPACITY):
        settle_among(logits, known, member_ids, out + row, count, CAPACITY, VOCAB, ID_BITS)


@triton.jit
def summed(some, high, low, TILE: tl.constexpr):
    """The total of some of [TILE] tokens as int64, adding a few tokens to each number."""
    high = tl.sum(tl.where(some, high, 0.0).reshape(TILE // SUMMED, SUMMED), 1).to(tl.int32)
    return (high.to(tl.int64) << 20) + tl.sum(tl.where(some, low, 0.0).reshape(TILE // SUMMED, SUMMED), 1).to(tl.int32)


@triton.jit
def before(pick, tile, bits, token, high, low, TILE: tl.constexpr):
    """The total of a tile's tokens that come before a pick: ids decide only in the pick's own tile."""
    pick_bits, pick_id = (pick >> 32).to(tl.int32), pick.to(tl.int32)
    found = summed(bits < pick_bits + (pick_id // TILE > tile), high, low, TILE)
    if pick_id // TILE == tile:
        found += summed((bits == pick_bits) & (token < pick_id), high, low, TILE)
    return found


@triton.jit
def weigh(logits, known, VOCAB: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    tl.static_assert(AT_ONCE == 2)
    row = tl.program_id(0).to(tl.int64)
    known += row * KNOWN
    if tl.load(known + STATE) == RACED:
        most, heat, reach = number(known + MOST), number(known + HEAT), integer(known + REACH)
        first, second = tl.load(known + PICK), tl.load(known + PICK + 1)
        total = tl.zeros([TILE // SUMMED], tl.int64)
        before_first = tl.zeros([TILE // SUMMED], tl.int64)
        before_second = tl.zeros([TILE // SUMMED], tl.int64)
        for tile in range(tl.program_id(1), TILES, tl.num_programs(1)):
            token = tile * TILE + tl.arange(0, TILE)
            logit = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
            bits = distance_bits(most, logit, heat)
            high, low = mass_parts(bits)
            total += summed(bits <= reach, high, low, TILE)
            before_first += before(first, tile, bits, token, high, low, TILE)
            before_second += before(second, tile, bits, token, high, low, TILE)
        tl.atomic_add(known + TOTAL, tl.sum(total, 0), sem="relaxed")
        tl.atomic_add(known + BEFORE, tl.sum(before_first, 0), sem="relaxed")
        tl.atomic_add(known + BEFORE + 1, tl.sum(before_second, 0), sem="relaxed")


def draw(logits: Tensor, draws: Draws, tiling: Tiling = TILING) -> Tensor:
    """Returns one id per row, [S] int64. logits: [S, V]"""
    (rows, vocab), device = logits.shape, logits.device
    step, noise_step = draws.temperature.stride(0), draws.noise.stride(0)
    assert logits.stride(1) == 1 and draws.noise.stride(1) == 1 and draws.positions.is_contiguous()
    assert draws.top_k.stride(0) == draws.top_p.stride(0) == draws.min_p.stride(0) == step
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    tiles = triton.cdiv(vocab, tiling.tile)
    groups = tiles * (tiling.tile // GROUP)
    tops, peaks = torch.empty(rows, groups, device=device), torch.empty(rows, tiles, device=device)
    known = torch.empty(rows, KNOWN.value, dtype=torch.int64, device=device)
    bits, ids = (torch.empty(rows, CAPACITY, dtype=torch.int32, device=device) for _ in range(2))  # of members
    every, share = (rows, tiles), (rows, min(tiles, triton.cdiv(tiling.programs, rows)))
    size = vocab, logits.stride(0)
    find_tops[every](logits, tops, peaks, *size, tiling.tile, GROUP, num_warps=4)
    survey[(rows,)](
        tops, known, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.noise, draws.positions, step, noise_step,
        vocab, groups, triton.next_power_of_2(groups), CAPACITY, num_warps=tiling.survey_warps,
    )  # fmt: skip
    gather[share](logits, peaks, known, ids, *size, tiling.tile, tiles, CAPACITY, num_warps=tiling.gather_warps)
    settle[(rows,)](logits, known, ids, out, *size, CAPACITY, FEW, vocab.bit_length(), num_warps=4)
    weigh[share](logits, known, *size, tiling.tile, tiles, num_warps=tiling.weigh_warps)
    draw_fallback[(rows,)](logits, peaks, known, bits, ids, out, *size, tiling.tile, tiles, CAPACITY, vocab.bit_length(), num_warps=16)
    return out
