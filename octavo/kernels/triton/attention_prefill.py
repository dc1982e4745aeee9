"""Prefill attention: rows with more than one query. One program takes a tile of a row's queries and one KV head.

    a tile of queries   16 tokens x 8 heads of the group = 128 rows of the product; all read the same keys
    keys of a tile      |---- seen by every query: no mask ----|-- around the diagonal: masked --|

A row of n queries has n // TOKENS + 1 tiles at most, so row r's tiles start at query_start[r] // TOKENS + r: the grid needs
no more than the number of tokens and rows, and a program finds its row by bisection. Late tiles are the long ones: they go first.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention_parts import HIDDEN, LN_2, finish, score, slots_of, soften

LN2 = tl.constexpr(LN_2)


@triton.jit
def row_of_tile(query_start, tile, num_rows, TOKENS: tl.constexpr):
    """The last row whose tiles start at or before this one."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def over_keys(
    queries,
    query_position,
    k_cache,
    v_cache,
    table,
    kv_head,
    low,
    high,
    end,
    scale,
    region_size,
    window,
    largest,
    total,
    mixed,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Takes the keys from low to high in; without MASKED they are whole tiles that every query sees."""
    dim = tl.arange(0, DIM)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        inside = position < end
        place = (slots_of(table, position, inside, region_size, BLOCK_SIZE, PAGED) * KV_HEADS + kv_head) * DIM
        if MASKED:
            keys = tl.load(k_cache + place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
            visible = position[None, :] <= query_position[:, None]
            if WINDOWED:
                visible &= position[None, :] > query_position[:, None] - window
            scores = tl.where(visible, score(queries, keys, scale), HIDDEN)
            values = tl.load(v_cache + place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        else:
            keys = tl.load(k_cache + place[:, None] + dim[None, :])
            scores = score(queries, keys, scale)
            values = tl.load(v_cache + place[:, None] + dim[None, :])
        largest, total, mixed = soften(scores, values, largest, total, mixed)
    return largest, total, mixed


@triton.jit(do_not_specialize=["num_rows", "table_width", "region_size", "window"])
def prefill(
    q,
    k_cache,
    v_cache,
    tables,
    query_start,
    context_len,
    out,
    lse,
    scale,
    num_rows,
    table_width,
    region_size,
    window,
    Q_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = row_of_tile(query_start, tile, num_rows, TOKENS)
    token = tl.load(query_start + row)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    offset = (tile - (token // TOKENS + row)).to(tl.int32) * TOKENS
    if (count <= 1) | (offset >= count):
        return  # decode's, or past the row's last tile

    end = tl.load(context_len + row).to(tl.int32)
    line = tl.arange(0, TOKENS * GROUP_TILE)
    query, member = offset + line // GROUP_TILE, line % GROUP_TILE
    present = (query < count) & (member < GROUP)
    head = kv_head * GROUP + member
    query_position = end - count + query
    dim = tl.arange(0, DIM)
    at = token.to(tl.int64) + query
    queries = tl.load(q + at[:, None] * Q_STRIDE + head[:, None] * DIM + dim[None, :], mask=present[:, None], other=0.0)
    table = tables + row.to(tl.int64) * table_width

    largest = tl.full([TOKENS * GROUP_TILE], HIDDEN, tl.float32)
    total = tl.zeros([TOKENS * GROUP_TILE], tl.float32)
    mixed = tl.zeros([TOKENS * GROUP_TILE, DIM], tl.float32)
    earliest = end - count + offset  # position of the tile's first query
    last = tl.minimum(earliest + TOKENS, end)
    if WINDOWED:
        masked_from = tl.maximum(earliest - window + 1, 0) // TILE * TILE
    else:
        masked_from = (earliest + 1) // TILE * TILE
        largest, total, mixed = over_keys(
            queries, query_position, k_cache, v_cache, table, kv_head, 0, masked_from, end, scale, region_size, window,
            largest, total, mixed, KV_HEADS, DIM, BLOCK_SIZE, PAGED, WINDOWED, False, TILE, STAGES,
        )  # fmt: skip
    largest, total, mixed = over_keys(
        queries, query_position, k_cache, v_cache, table, kv_head, masked_from, last, end, scale, region_size, window,
        largest, total, mixed, KV_HEADS, DIM, BLOCK_SIZE, PAGED, WINDOWED, True, TILE, STAGES,
    )  # fmt: skip
    result, log_sum = finish(largest, total, mixed)

    place = at * HEADS + head
    tl.store(out + place[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=present[:, None])
    if WITH_LSE:
        tl.store(lse + place, log_sum * LN2, mask=present)
