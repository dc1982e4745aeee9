"""Decode attention: rows with one query each. Each program takes one share of the work.

    shares     | row 2, part 0, heads 0 1 2 | part 1, heads 0 1 2 | row 0, heads 0 1 2 | row 1, heads 0 1 2 |    longest row first
    programs     0           1            2   3           4     5   6       7       8    9       10     11    ... those past the last: none

All query heads of a group are answered by the program that reads their keys (padded to 16, for tl.dot), so each byte of the cache
is read once. The shares are listed once a step (`decode_shares.py`). A GPU starts the next program as soon as there is room for it:
a multiprocessor that gets less of the memory's bandwidth than another runs fewer of them, and the short ones at the end fill up.

A row that is longer than a share leaves parts. Of FAN neighbours whoever comes last merges all, in their order, and then is one of
the next FAN: after a few rounds the last of the last has the row. So who is quicker than whom changes no bit.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention.common import HIDDEN, LN_2, LOG2E, LOWEST, begin, finish, load_lines, mix, places_of, score, weigh
from octavo.kernels.triton.attention.decode_shares import AT_ALL, AT_ARRIVED, WORDS, load_share
from octavo.kernels.triton.pdl import begin as begin_pdl
from octavo.kernels.triton.pdl import wait

LN2 = tl.constexpr(LN_2)
FAN = tl.constexpr(8)  # parts merged at once; more than there are rounds, see `merge`


@triton.jit(do_not_specialize=["table_width", "region_size"])
def decode(
    q,
    k_cache,
    v_cache,
    tables,
    shares,
    out,
    lse,
    sinks,
    slopes,
    left,
    left_lse,
    scale,
    unit,
    cap,
    table_width,
    region_size,
    Q_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    MERGE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TOGETHER: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """left [most_parts, GROUP, DIM], left_lse [most_parts, GROUP], both float32: what the shares of rows that are cut leave"""
    begin_pdl(PDL)
    wait(PDL)
    share = tl.program_id(0)
    if share >= tl.load(shares + AT_ALL):
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    token, row, kv_head, low, high, end, part, parts = load_share(shares, share)
    member = tl.arange(0, GROUP_TILE)
    present = member < GROUP
    head = kv_head * GROUP + member
    queries = load_lines(q, token.to(tl.int64) * Q_STRIDE + head * DIM, present, DIM, DIM_TILE, True)
    table = tables + row.to(tl.int64) * table_width
    slope = tl.load(slopes + head, mask=present, other=0.0) if SLOPED else 0.0

    largest, total, mixed = begin(sinks, head, present, unit, GROUP_TILE, DIM_TILE, WITH_SINKS)
    if WITH_SINKS:  # counted once, here or by merge: from the lowest, a part's first key wipes it out
        largest = tl.where(parts == 1, largest, LOWEST)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        inside = position < high
        of_keys = places_of(table, position, inside, kv_head, region_size, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER)
        keys = load_lines(k_cache, of_keys, inside, DIM, DIM_TILE, True)
        behind = (position - (end - 1))[None, :]
        scores = tl.where(inside[None, :], score(queries, keys, scale, cap, slope, behind, CAPPED, SLOPED), HIDDEN)
        values = load_lines(v_cache, of_keys, inside, DIM, DIM_TILE, True)
        largest, total, weights, fade = weigh(scores, largest, total, unit)
        mixed = mix(weights, fade, values, mixed)

    result, log_sum = finish(largest, total, mixed, unit)
    if parts == 1:
        put(out, token.to(tl.int64) * HEADS + head, present, result, DIM, DIM_TILE)
        if WITH_LSE:
            tl.store(lse + token.to(tl.int64) * HEADS + head, log_sum * LN2, mask=present)
    else:
        put(left, share.to(tl.int64) * GROUP + member, present, result, DIM, DIM_TILE)
        tl.store(left_lse + share * GROUP + member, log_sum, mask=present)
        merge(
            left, left_lse, shares, out, lse, sinks, share, part, parts, token, kv_head,
            HEADS, KV_HEADS, DIM, DIM_TILE, MERGE_TILE, WITH_SINKS, WITH_LSE,
        )  # fmt: skip


@triton.jit
def put(target, line, mask, numbers, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """numbers [N, DIM_TILE] at the lines [N] of [.., DIM]"""
    dim = tl.arange(0, DIM_TILE)
    tl.store(target + line[:, None] * DIM + dim[None, :], numbers.to(target.dtype.element_ty), mask=mask[:, None] & (dim < DIM)[None, :])


@triton.jit
def merge(
    left,
    left_lse,
    shares,
    out,
    lse,
    sinks,
    share,
    part,
    parts,
    token,
    kv_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    MERGE_TILE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Of parts that stand `stride` apart FAN are merged into the first one's place, in each round by who comes last. Arrivals at
    round r are counted by the r-th of the parts that are merged: as FAN is more than there are rounds, by nobody else."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, MERGE_TILE)
    present = member < GROUP
    head = kv_head * GROUP + member
    part_0 = share - part * KV_HEADS
    stride, turn = 1, 0
    while stride < parts:
        span = stride * FAN
        part = part // span * span
        count = tl.minimum(tl.cdiv(parts - part, stride), FAN)
        first = part_0 + part * KV_HEADS
        last = count == 1
        if count > 1:
            tl.debug_barrier()  # all threads have put down what they have, before one says so
            arrived = shares + (1 + first + turn * KV_HEADS) * WORDS + AT_ARRIVED
            last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1
            if last:
                tl.store(arrived, 0)
                final = span >= parts
                result, log_sum = merged(
                    left, left_lse, sinks, first, count, stride, final, head, present,
                    GROUP, KV_HEADS, DIM, DIM_TILE, MERGE_TILE, WITH_SINKS,
                )  # fmt: skip
                if final:
                    put(out, token.to(tl.int64) * HEADS + head, present, result, DIM, DIM_TILE)
                    if WITH_LSE:
                        tl.store(lse + token.to(tl.int64) * HEADS + head, log_sum * LN2, mask=present)
                else:
                    tl.debug_barrier()  # all threads have read what is now written over
                    put(left, first.to(tl.int64) * GROUP + member, present, result, DIM, DIM_TILE)
                    tl.store(left_lse + first * GROUP + member, log_sum, mask=present)
        stride = tl.where(last, span, parts)
        turn += 1


@triton.jit
def merged(
    left,
    left_lse,
    sinks,
    first,
    count,
    stride,
    final,
    head,
    present,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    MERGE_TILE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    """(output, log-sum-exp in units of log2) of `count` parts. Others left them: they are read past the multiprocessor's own cache."""
    dim = tl.arange(0, DIM_TILE)
    line = first.to(tl.int64) * GROUP + tl.arange(0, MERGE_TILE)
    apart = stride * KV_HEADS * GROUP
    largest = tl.full([MERGE_TILE], LOWEST, tl.float32)
    total = tl.zeros([MERGE_TILE], tl.float32)
    mixed = tl.zeros([MERGE_TILE, DIM_TILE], tl.float32)
    for one in tl.static_range(FAN):
        log_sum = tl.load(left_lse + line + one * apart, mask=present & (one < count), other=LOWEST, cache_modifier=".cg")
        largest = tl.maximum(largest, log_sum)
    if WITH_SINKS:
        sink = tl.load(sinks + head, mask=present & final, other=float("-inf")).to(tl.float32) * LOG2E
        largest = tl.maximum(largest, sink)
        total = tl.exp2(sink - largest)
    for one in tl.static_range(FAN):
        there = present & (one < count)
        log_sum = tl.load(left_lse + line + one * apart, mask=there, other=float("-inf"), cache_modifier=".cg")
        pointers = left + (line + one * apart)[:, None] * DIM + dim[None, :]
        numbers = tl.load(pointers, mask=there[:, None] & (dim < DIM)[None, :], other=0.0, cache_modifier=".cg")
        weight = tl.exp2(log_sum - largest)
        total += weight
        mixed += weight[:, None] * numbers
    return finish(largest, total, mixed, 1.0)
