"""Decode attention: rows with one query each. One program takes a row, a KV head and a part of the row's context.

    row's context   |-------- split 0 --------|-------- split 1 --------|-- split 2 --|      splits are whole tiles of keys
    a program       queries of the group (padded to 16, for tl.dot)  x  its split, tile by tile

All query heads of a group are answered by the program that reads their keys, so each byte of the cache is read once. With one
split it writes the output itself; with more, each writes a part and its log-sum-exp, and `merge` weighs them.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention_parts import HIDDEN, LN_2, finish, score, slots_of, soften

LN2 = tl.constexpr(LN_2)


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
    parts,
    parts_lse,
    scale,
    table_width,
    region_size,
    window,
    Q_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    token = tl.load(query_start + row).to(tl.int64)
    if tl.load(query_start + row + 1) != token + 1:
        return  # prefill's, or no query at all

    end = tl.load(context_len + row).to(tl.int32)
    first = tl.maximum(end - window, 0) if WINDOWED else 0
    share = tl.cdiv(tl.cdiv(end - first, SPLITS), TILE) * TILE
    low = first + split * share
    high = tl.minimum(low + share, end)

    dim = tl.arange(0, DIM)
    member = tl.arange(0, GROUP_TILE)
    head = kv_head * GROUP + member
    present = member < GROUP
    queries = tl.load(q + token * Q_STRIDE + head[:, None] * DIM + dim[None, :], mask=present[:, None], other=0.0)
    table = tables + row.to(tl.int64) * table_width

    largest = tl.full([GROUP_TILE], HIDDEN, tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    mixed = tl.zeros([GROUP_TILE, DIM], tl.float32)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        inside = position < high
        place = (slots_of(table, position, inside, region_size, BLOCK_SIZE, PAGED) * KV_HEADS + kv_head) * DIM
        keys = tl.load(k_cache + place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], score(queries, keys, scale), HIDDEN)
        values = tl.load(v_cache + place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        largest, total, mixed = soften(scores, values, largest, total, mixed)
    result, log_sum = finish(largest, total, mixed)

    if SPLITS == 1:
        at = token * HEADS + head
        tl.store(out + at[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=present[:, None])
        if WITH_LSE:
            tl.store(lse + at, log_sum * LN2, mask=present)
    else:
        at = (row.to(tl.int64) * SPLITS + split) * HEADS + head
        tl.store(parts + at[:, None] * DIM + dim[None, :], result, mask=present[:, None])
        tl.store(parts_lse + at, log_sum, mask=present)


@triton.jit
def merge(
    parts,
    parts_lse,
    query_start,
    out,
    lse,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program a row and head. parts [R, SPLITS, HEADS, DIM], parts_lse [R, SPLITS, HEADS], both float32"""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    if tl.load(query_start + row + 1) != token + 1:
        return
    at = (row.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)) * HEADS + head
    dim = tl.arange(0, DIM)
    log_sum = tl.load(parts_lse + at)
    part = tl.load(parts + at[:, None] * DIM + dim[None, :])
    largest = tl.maximum(tl.max(log_sum, 0), HIDDEN)  # finite also where no split saw a key
    weights = tl.exp2(log_sum - largest)
    total = tl.sum(weights, 0)
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    result = tl.sum(part * weights[:, None], 0) / safe
    place = token * HEADS + head
    tl.store(out + place * DIM + dim, result.to(out.dtype.element_ty))
    if WITH_LSE:
        tl.store(lse + place, tl.where(seen, largest + tl.log2(safe), float("-inf")) * LN2)
