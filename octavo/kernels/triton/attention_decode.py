"""Decode attention: rows with one query each. One program takes a row, a KV head and a part of the row's context.

    row's context   |-------- split 0 --------|-------- split 1 --------|-- split 2 --|      splits are whole tiles of keys
    a program       queries of the group (padded to 16, for tl.dot)  x  its split, tile by tile

All query heads of a group are answered by the program that reads their keys, so each byte of the cache is read once. How many
splits there may be is fixed when the kernels are launched, and in a CUDA graph for good; how many a row fills depends on its
length: none is shorter than LEAST tokens, but for the last. A row that fills one is written at once; of a row that fills more,
each split writes a part and its log-sum-exp, and `merge` weighs them.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention_parts import HIDDEN, LN_2, LOG2E, LOWEST, begin, finish, load_lines, mix, score, slots_of, weigh

LN2 = tl.constexpr(LN_2)


@triton.jit
def splits_of(context, window, WINDOWED: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr):
    """(first key seen, keys of a split, splits that hold any; at least one)"""
    first = tl.maximum(context - window, 0) if WINDOWED else 0
    share = tl.maximum(tl.cdiv(tl.cdiv(context - first, SPLITS), TILE) * TILE, LEAST)
    return first, share, tl.maximum(tl.cdiv(context - first, share), 1)


@triton.jit(do_not_specialize=["table_width", "region_size", "window"])
def decode(
    q,
    k_cache,
    v_cache,
    tables,
    query_start,
    context_len,
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
    window,
    Q_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    token = tl.load(query_start + row).to(tl.int64)
    if tl.load(query_start + row + 1) != token + 1:
        return  # prefill's, or no query at all

    end = tl.load(context_len + row).to(tl.int32)
    first, share, used = splits_of(end, window, WINDOWED, SPLITS, LEAST, TILE)
    if split >= used:
        return
    low = first + split * share
    high = tl.minimum(low + share, end)

    member = tl.arange(0, GROUP_TILE)
    head = kv_head * GROUP + member
    present = member < GROUP
    queries = load_lines(q, token * Q_STRIDE + head * DIM, present, DIM, DIM_TILE, True)
    table = tables + row.to(tl.int64) * table_width
    slope = tl.load(slopes + head, mask=present, other=0.0) if SLOPED else 0.0

    alone = used == 1
    largest, total, mixed = begin(sinks, head, present, unit, GROUP_TILE, DIM_TILE, WITH_SINKS)
    if WITH_SINKS:  # counted once, by the only split or by merge: from the lowest, a split's first key wipes it out
        largest = tl.where(alone, largest, LOWEST)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        inside = position < high
        place = (slots_of(table, position, inside, region_size, BLOCK_SIZE, PAGED) * KV_HEADS + kv_head) * DIM
        keys = load_lines(k_cache, place, inside, DIM, DIM_TILE, True)
        behind = (position - (end - 1))[None, :]
        scores = tl.where(inside[None, :], score(queries, keys, scale, cap, slope, behind, CAPPED, SLOPED), HIDDEN)
        values = load_lines(v_cache, place, inside, DIM, DIM_TILE, True)
        largest, total, weights, fade = weigh(scores, largest, total, unit)
        mixed = mix(weights, fade, values, mixed)
    result, log_sum = finish(largest, total, mixed, unit)

    dim = tl.arange(0, DIM_TILE)
    wide = (dim < DIM)[None, :]
    at = token * HEADS + head
    tl.store(out + at[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=(present & alone)[:, None] & wide)
    if WITH_LSE:
        tl.store(lse + at, log_sum * LN2, mask=present & alone)
    if SPLITS > 1:
        at = (row.to(tl.int64) * SPLITS + split) * HEADS + head
        one_of_many = present & (used > 1)
        tl.store(parts + at[:, None] * DIM + dim[None, :], result, mask=one_of_many[:, None] & wide)
        tl.store(parts_lse + at, log_sum, mask=one_of_many)


@triton.jit(do_not_specialize=["window"])
def merge(
    parts,
    parts_lse,
    query_start,
    context_len,
    out,
    lse,
    sinks,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row and head. parts [R, SPLITS, HEADS, DIM], parts_lse [R, SPLITS, HEADS], both float32"""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    if tl.load(query_start + row + 1) != token + 1:
        return
    _first, _share, used = splits_of(tl.load(context_len + row).to(tl.int32), window, WINDOWED, SPLITS, LEAST, TILE)
    if used == 1:
        return  # decode wrote it
    split = tl.arange(0, SPLITS)
    at = (row.to(tl.int64) * SPLITS + split) * HEADS + head
    log_sum = tl.load(parts_lse + at, mask=split < used, other=float("-inf"))
    part = load_lines(parts, at * DIM, split < used, DIM, DIM_TILE, True)
    largest = tl.max(log_sum, 0)
    if WITH_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        largest = tl.maximum(largest, sink)
    weights = tl.exp2(log_sum - largest)
    total = tl.sum(weights, 0)
    if WITH_SINKS:
        total += tl.exp2(sink - largest)
    place = token * HEADS + head
    dim = tl.arange(0, DIM_TILE)
    tl.store(out + place * DIM + dim, (tl.sum(part * weights[:, None], 0) / total).to(out.dtype.element_ty), mask=dim < DIM)
    if WITH_LSE:
        tl.store(lse + place, (largest + tl.log2(total)) * LN2)
