"""Decode attention: rows with one query each. Every program reads as many tiles of keys as every other, whatever the rows' lengths.

    tiles      | row 0, head 0 | head 1        | row 1, head 0 | head 1 | row 2, head 0                | head 1                   |
    programs   |----------- 0 -----------|----------- 1 -----------|----------- 2 -----------|----------- 3 -----------|--- 4 ----|
    a part             left by 0 ^-----^---^ left by 1      and so on: whatever a border between programs cuts

All query heads of a group are answered by the program that reads their keys (padded to 16, for tl.dot), so each byte of the cache
is read once. The number of programs is that which a GPU runs at once; the list and the shares are made once a step
(`decode_shares.py`). A head that lies wholly in a share is written at once; of any other, each program leaves a part and its
log-sum-exp, and `merge` weighs them. A program leaves two at most: first what it began in the midst of, or cannot end, then what
it cannot end.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention_parts import HIDDEN, LN_2, LOG2E, LOWEST, begin, finish, load_lines, mix, places_of, score, weigh
from octavo.kernels.triton.decode_shares import AT_ALL, AT_SHARE, load_line
from octavo.kernels.triton.dependent import begin as begin_dependents
from octavo.kernels.triton.dependent import wait

LN2 = tl.constexpr(LN_2)


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
    parts,
    parts_lse,
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
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TOGETHER: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    begin_dependents(DEPENDENT)
    wait(DEPENDENT)
    program = tl.program_id(0)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    share, in_all = tl.load(shares + AT_SHARE), tl.load(shares + AT_ALL)
    start, tiles, token, row, first, end, following = load_line(shares, 1 + program)
    at = program * share
    if at >= in_all:
        return
    stop = tl.minimum(at + share, in_all)
    kv_head = (at - start) // tiles
    tile = (at - start) % tiles
    part = program * 2

    member = tl.arange(0, GROUP_TILE)
    present = member < GROUP
    dim = tl.arange(0, DIM_TILE)
    filled = present[:, None] & (dim < DIM)[None, :]
    while at < stop:
        # Asked for before the keys are, so that it is there when they have been read.
        _start, next_tiles, next_token, next_row, next_first, next_end, next_following = load_line(shares, following)
        count = tl.minimum(tiles - tile, stop - at)
        whole = count == tiles
        head = kv_head * GROUP + member
        queries = load_lines(q, token.to(tl.int64) * Q_STRIDE + head * DIM, present, DIM, DIM_TILE, True)
        table = tables + row.to(tl.int64) * table_width
        slope = tl.load(slopes + head, mask=present, other=0.0) if SLOPED else 0.0
        low = first + tile * TILE
        high = tl.minimum(low + count * TILE, end)

        largest, total, mixed = begin(sinks, head, present, unit, GROUP_TILE, DIM_TILE, WITH_SINKS)
        if WITH_SINKS:  # counted once, here or by merge: from the lowest, a part's first key wipes it out
            largest = tl.where(whole, largest, LOWEST)
        for position_0 in tl.range(low, high, TILE, num_stages=STAGES):
            position = position_0 + tl.arange(0, TILE)
            inside = position < high
            of_keys = places_of(table, position, inside, kv_head, region_size, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER)
            keys = load_lines(k_cache, of_keys, inside, DIM, DIM_TILE, True)
            behind = (position - (end - 1))[None, :]
            scores = tl.where(inside[None, :], score(queries, keys, scale, cap, slope, behind, CAPPED, SLOPED), HIDDEN)
            values = load_lines(v_cache, of_keys, inside, DIM, DIM_TILE, True)
            largest, total, weights, fade = weigh(scores, largest, total, unit)
            mixed = mix(weights, fade, values, mixed)
        result, log_sum = finish(largest, total, mixed, unit)

        if whole:
            line = token.to(tl.int64) * HEADS + head
            tl.store(out + line[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=filled)
            if WITH_LSE:
                tl.store(lse + line, log_sum * LN2, mask=present)
        else:
            place = part * GROUP + member
            tl.store(parts + place[:, None] * DIM + dim[None, :], result, mask=filled)
            tl.store(parts_lse + place, log_sum, mask=present)

        part = program * 2 + 1
        at += count
        tile = 0
        kv_head += 1
        if kv_head == KV_HEADS:
            kv_head = 0
            tiles, token, row, first, end, following = next_tiles, next_token, next_row, next_first, next_end, next_following


@triton.jit
def merge(
    parts,
    parts_lse,
    shares,
    out,
    lse,
    sinks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program p merges what the border before its share cuts, unless an earlier border does; one program a member of the group.
    parts [P, 2, GROUP, DIM], parts_lse [P, 2, GROUP], both float32"""
    wait(DEPENDENT)
    program, member = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    share, in_all = tl.load(shares + AT_SHARE), tl.load(shares + AT_ALL)
    start, tiles, token, _row, _first, _end, _following = load_line(shares, 1 + program)
    at = program * share
    if at >= in_all:
        return
    kv_head = (at - start) // tiles
    begun = start + kv_head * tiles
    if (begun == at) | (begun < at - share):
        return
    last = (begun + tiles - 1) // share  # program that left a part
    head = kv_head * GROUP + member

    largest = LOWEST
    total = 0.0
    if WITH_SINKS:
        largest = tl.maximum(tl.load(sinks + head).to(tl.float32) * LOG2E, LOWEST)
        total = 1.0
    mixed = tl.zeros([DIM_TILE], tl.float32)
    for first in range(program - 1, last + 1, PARTS):
        owner = first + tl.arange(0, PARTS)
        left = owner <= last
        second = (owner == program - 1) & (begun > at - share)
        line = (owner * 2 + second.to(tl.int32)) * GROUP + member
        log_sum = tl.load(parts_lse + line, mask=left, other=float("-inf"))
        part = load_lines(parts, line * DIM, left, DIM, DIM_TILE, True)
        now = tl.maximum(largest, tl.max(log_sum, 0))
        weights, fade = tl.exp2(log_sum - now), tl.exp2(largest - now)
        total = total * fade + tl.sum(weights, 0)
        mixed = mixed * fade + tl.sum(part * weights[:, None], 0)
        largest = now
    line = token.to(tl.int64) * HEADS + head
    dim = tl.arange(0, DIM_TILE)
    tl.store(out + line * DIM + dim, (mixed / total).to(out.dtype.element_ty), mask=dim < DIM)
    if WITH_LSE:
        tl.store(lse + line, (largest + tl.log2(total)) * LN2)
