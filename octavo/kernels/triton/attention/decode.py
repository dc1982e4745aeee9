"""Decode attention: rows with one query each. Each program takes one split-KV work item ("share").

    shares     | row 2, part 0, heads 0 1 2 | part 1, heads 0 1 2 | row 0, heads 0 1 2 | row 1, heads 0 1 2 |    longest row first
    programs     0           1            2   3           4     5   6       7       8    9       10     11    ... after the last: none

One program processes all query heads of a group (padded to 16, for tl.dot), so each byte of the cache
is read once. The work items are listed once per step (`decode_shares.py`). A GPU starts the next program as soon as there is room:
a multiprocessor with less memory bandwidth than another runs fewer of them, and the short ones at the end balance the load.

A row that is longer than a work item produces parts. Of FAN neighbours the last to finish merges all, in their order, and then is one
of the next FAN: after a few rounds the last program has the row. So the timing of programs does not change any bit.

The keys of shared-prefix groups were read before (`read_in_teams`): a row in such groups starts after these keys, and its result is
merged with those of its groups.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention.common import HIDDEN, LN_2, LOG2E, LOWEST, begin, finish, load_lines, mix, places_of, score, weigh
from octavo.kernels.triton.attention.decode_shares import AT_ALL, AT_ARRIVED, WORDS, load_depth, load_share
from octavo.kernels.triton.pdl import begin as begin_pdl
from octavo.kernels.triton.pdl import wait
from octavo.step import team_words

LN2 = tl.constexpr(LN_2)
FAN = tl.constexpr(8)  # parts merged at once; more than the number of rounds, see `merge`
LEVELS = tl.constexpr(team_words.MOST_LEVELS)


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
    levels,
    levels_lse,
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
    WITH_LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """left [most_parts, GROUP, DIM], left_lse [most_parts, GROUP], both float32: results of parts of split rows

    levels [R, LEVELS, HEADS, DIM] and levels_lse [R, LEVELS, HEADS], float32: results of shared-prefix groups, as many as the share says
    """
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
    depth = load_depth(shares, share) if WITH_LEVELS else 0

    largest, total, mixed = begin(sinks, head, present, unit, GROUP_TILE, DIM_TILE, WITH_SINKS)
    if WITH_SINKS:  # counted once, here or when parts are merged: a part starts at the lowest score, which its first key removes
        largest = tl.where((parts == 1) & (depth == 0), largest, LOWEST)
    result, log_sum = read_keys(
        queries, k_cache, v_cache, table, kv_head, low, high, end, slope, largest, total, mixed, scale, unit, cap, region_size,
        KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, CAPPED, SLOPED, TILE, STAGES,
    )  # fmt: skip
    if parts == 1:
        answer(
            result, log_sum, out, lse, sinks, levels, levels_lse, row, token, head, present, depth,
            HEADS, DIM, DIM_TILE, WITH_SINKS, WITH_LSE, WITH_LEVELS,
        )  # fmt: skip
    else:
        put(left, share.to(tl.int64) * GROUP + member, present, result, DIM, DIM_TILE)
        tl.store(left_lse + share * GROUP + member, log_sum, mask=present)
        merge(
            left, left_lse, shares, out, lse, sinks, levels, levels_lse, share, part, parts, row, token, kv_head, depth,
            HEADS, KV_HEADS, DIM, DIM_TILE, MERGE_TILE, WITH_SINKS, WITH_LSE, WITH_LEVELS,
        )  # fmt: skip


@triton.jit
def read_keys(
    queries,
    k_cache,
    v_cache,
    table,
    kv_head,
    low,
    high,
    end,
    slope,
    largest,
    total,
    mixed,
    scale,
    unit,
    cap,
    region_size,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TOGETHER: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(output, log-sum-exp in units of log2) of queries [N, DIM_TILE] over the keys of a table from low to high

    end: the context of the query's row, or of the row of each query, [N, 1]
    """
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        inside = position < high
        of_keys = places_of(table, position, inside, kv_head, region_size, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER)
        keys = load_lines(k_cache, of_keys, inside, DIM, DIM_TILE, True)
        behind = position[None, :] - (end - 1)
        scores = tl.where(inside[None, :], score(queries, keys, scale, cap, slope, behind, CAPPED, SLOPED), HIDDEN)
        values = load_lines(v_cache, of_keys, inside, DIM, DIM_TILE, True)
        largest, total, weights, fade = weigh(scores, largest, total, unit)
        mixed = mix(weights, fade, values, mixed)
    return finish(largest, total, mixed, unit)


@triton.jit
def answer(
    result,
    log_sum,
    out,
    lse,
    sinks,
    levels,
    levels_lse,
    row,
    token,
    head,
    present,
    depth,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    WITH_LEVELS: tl.constexpr,
):
    """Stores a row's result over its own keys, merged with those of its shared-prefix groups, if any, in their order."""
    if WITH_LEVELS:  # noqa: SIM102 (a compile-time constant, unlike the depth)
        if depth > 0:
            result, log_sum = with_levels(
                result, log_sum, levels, levels_lse, sinks, row.to(tl.int64) * (LEVELS * HEADS) + head, head, present, depth,
                HEADS, DIM, DIM_TILE, WITH_SINKS,
            )  # fmt: skip
    line = token.to(tl.int64) * HEADS + head
    put(out, line, present, result, DIM, DIM_TILE)
    if WITH_LSE:
        tl.store(lse + line, log_sum * LN2, mask=present)


@triton.jit
def with_levels(
    result,
    log_sum,
    levels,
    levels_lse,
    sinks,
    line,
    head,
    present,
    depth,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    """(output, log-sum-exp in units of log2) of a row's own keys and of all its levels, with the sink"""
    dim = tl.arange(0, DIM_TILE)
    largest, total, mixed = log_sum, tl.full(log_sum.shape, 1.0, tl.float32), result
    for level in range(depth):
        log_sum = tl.load(levels_lse + line + level * HEADS, mask=present, other=LOWEST)
        pointers = levels + (line + level * HEADS)[:, None] * DIM + dim[None, :]
        numbers = tl.load(pointers, mask=present[:, None] & (dim < DIM)[None, :], other=0.0)
        now = tl.maximum(largest, log_sum)
        fade, weight = tl.exp2(largest - now), tl.exp2(log_sum - now)
        largest, total, mixed = now, total * fade + weight, mixed * fade[:, None] + numbers * weight[:, None]
    if WITH_SINKS:
        sink = tl.load(sinks + head, mask=present, other=0.0).to(tl.float32) * LOG2E
        now = tl.maximum(largest, sink)
        fade = tl.exp2(largest - now)
        largest, total, mixed = now, total * fade + tl.exp2(sink - now), mixed * fade[:, None]
    return finish(largest, total, mixed, 1.0)


@triton.jit
def put(target, line, mask, numbers, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Stores numbers [N, DIM_TILE] at the lines [N] of [.., DIM]."""
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
    levels,
    levels_lse,
    share,
    part,
    parts,
    row,
    token,
    kv_head,
    depth,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    MERGE_TILE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    WITH_LEVELS: tl.constexpr,
):
    """Merges FAN parts that are `stride` apart into the first one's place; in each round the last to arrive does it. Arrivals of
    round r are counted by the r-th of the merged parts: since FAN is more than the number of rounds, each counter has one use."""
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
            tl.debug_barrier()  # all threads must have stored their results before one signals
            arrived = shares + (1 + first + turn * KV_HEADS) * WORDS + AT_ARRIVED
            last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1
            if last:
                tl.store(arrived, 0)
                final = span >= parts
                result, log_sum = merged(
                    left, left_lse, sinks, first, count, stride, final & (depth == 0), head, present,
                    GROUP, KV_HEADS, DIM, DIM_TILE, MERGE_TILE, WITH_SINKS,
                )  # fmt: skip
                if final:
                    answer(
                        result, log_sum, out, lse, sinks, levels, levels_lse, row, token, head, present, depth,
                        HEADS, DIM, DIM_TILE, WITH_SINKS, WITH_LSE, WITH_LEVELS,
                    )  # fmt: skip
                else:
                    tl.debug_barrier()  # all threads must have read what is now overwritten
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
    with_sink,
    head,
    present,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    MERGE_TILE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    """(output, log-sum-exp in units of log2) of `count` parts. Other programs stored them, so loads bypass the L1 cache."""
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
        sink = tl.load(sinks + head, mask=present & with_sink, other=float("-inf")).to(tl.float32) * LOG2E
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
