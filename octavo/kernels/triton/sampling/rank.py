"""Computes the rank of the id of each row, and the best tokens of the row, without sorting it.

    find_tops   the largest logit of every 64 tokens                                      one pass
    stand       the total probability of the row, and how many tokens are nearer          one pass
    nearest     `count` groups have a token up to the count-th smallest of their minimum distances: those tokens are collected,
                and taken out one by one. They always fit: fewer than `count` groups have nearer ones, and ties are counted

More than MOST are sorted by torch, over keys of bits and id.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.sampling import Ranking
from octavo.kernels.triton.sampling.distances import (
    CAPACITY,
    GROUP,
    KEY_BITS,
    LARGEST,
    TILE,
    collect,
    distance_bits,
    find_tops,
    highest,
    last_within,
    mass,
    read,
    row_total,
)

MOST = CAPACITY // (GROUP + 1)  # near tokens that are certain to fit
KEYS_AT_ONCE = 2**24  # of those that torch sorts: 128 MiB


@triton.jit(do_not_specialize=["ids_step"], do_not_specialize_on_alignment=["ids"])
def stand(
    logits,
    ids,
    peaks,
    sums,
    counts,
    ids_step,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * STRIDE
    token = tile * TILE + tl.arange(0, TILE)
    most = highest(peaks + row * TILES, TILES, PADDED_TILES)
    bits = distance_bits(most, read(logits, token, VOCAB), 1.0)
    chosen = distance_bits(most, read(logits, tl.load(ids + row * ids_step), VOCAB), 1.0)
    inside = token < VOCAB
    tl.store(sums + row * TILES + tile, tl.sum(tl.where(inside, mass(bits), 0), 0))
    tl.store(counts + row * TILES + tile, tl.sum((inside & (bits < chosen)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["ids_step", "count"], do_not_specialize_on_alignment=["ids"])
def nearest(
    logits,
    ids,
    tops,
    peaks,
    sums,
    counts,
    chosen,
    ranks,
    totals,
    near,
    near_ids,
    member_bits,
    member_ids,
    ids_step,
    count,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * STRIDE
    group = tl.arange(0, PADDED_GROUPS)
    top = tl.load(tops + row * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
    most = tl.max(top, 0)
    tl.store(chosen + row, distance_bits(most, read(logits, tl.load(ids + row * ids_step), VOCAB), 1.0).to(tl.float32, bitcast=True))
    tl.store(totals + row, row_total(sums + row * TILES, TILES, PADDED_TILES))
    tl.store(ranks + row, row_total(counts + row * TILES, TILES, PADDED_TILES).to(tl.int64) + 1)
    if count > 0:
        least = tl.where(group < GROUPS, distance_bits(most, top, 1.0), LARGEST)
        high = last_within(least, (group < GROUPS).to(tl.int32), count, KEY_BITS)
        bits_at, ids_at = member_bits + row * CAPACITY, member_ids + row * CAPACITY
        found = collect(logits, peaks + row * TILES, most, 1.0, LARGEST, 0, high, count, bits_at, ids_at, VOCAB, TILE, TILES, CAPACITY)
        slot = tl.arange(0, CAPACITY)
        keys = tl.load(bits_at + slot, mask=slot < found, other=LARGEST).to(tl.int64) << 32
        keys |= tl.load(ids_at + slot, mask=slot < found, other=VOCAB)
        for place in range(count):
            best = tl.min(keys, 0)
            tl.store(near + row * count + place, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True))
            tl.store(near_ids + row * count + place, best & 0xFFFFFFFF)
            keys = tl.where(keys == best, 0x7FFFFFFFFFFFFFFF, keys)


def rank(logits: Tensor, ids: Tensor, count: int) -> Ranking:
    """Returns the rank of each row's id, and the row's `count` best. logits: [S, V]; ids: [S]"""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    count, by_torch = min(count, vocab), count > MOST
    tiles, device = triton.cdiv(vocab, TILE), logits.device
    groups, padded = tiles * (TILE // GROUP), triton.next_power_of_2(tiles)
    tops, peaks = (torch.empty(rows, width, device=device) for width in (groups, tiles))
    sums = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    counts = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    members = torch.empty(2, rows, CAPACITY, dtype=torch.int32, device=device)
    ranks, totals = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))  # separate tensors, so that each is aligned
    found = Ranking(
        chosen=torch.empty(rows, device=device), ranks=ranks, totals=totals,
        near=torch.empty(rows, count, device=device), near_ids=torch.empty(rows, count, dtype=torch.int64, device=device),
    )  # fmt: skip
    if rows == 0:
        return found
    shape = {"VOCAB": vocab, "STRIDE": logits.stride(0), "TILE": TILE}
    across = {"TILES": tiles, "PADDED_TILES": padded}
    find_tops[(rows, tiles)](logits, tops, peaks, **shape, GROUP=GROUP, num_warps=4)
    stand[(rows, tiles)](logits, ids, peaks, sums, counts, ids.stride(0), **shape, **across, num_warps=4)
    nearest[(rows,)](
        logits, ids, tops, peaks, sums, counts, found.chosen, ranks, totals, found.near, found.near_ids, *members,
        ids.stride(0), 0 if by_torch else count, **shape, **across, GROUPS=groups, PADDED_GROUPS=triton.next_power_of_2(groups),
        CAPACITY=CAPACITY, num_warps=8,
    )  # fmt: skip
    if by_torch:
        size = max(KEYS_AT_ONCE // vocab, 1)
        for start in range(0, rows, size):
            some = slice(start, start + size)
            _order(logits[some], found.near[some], found.near_ids[some])
    return found


def _order(logits: Tensor, near: Tensor, near_ids: Tensor) -> None:
    """Fills in the best of each row in the order (distance, id). logits: [S, V]; near, near_ids: [S, count]"""
    distance = logits.float().amax(-1, keepdim=True) - logits.float()
    bits = distance.abs_().view(torch.int32).to(torch.int64)
    keys = bits.bitwise_left_shift_(32).bitwise_or_(torch.arange(logits.shape[1], device=logits.device))
    best = keys.topk(near.shape[1], largest=False).values
    near.copy_((best >> 32).to(torch.int32).view(torch.float32))
    near_ids.copy_(best & 0xFFFFFFFF)
