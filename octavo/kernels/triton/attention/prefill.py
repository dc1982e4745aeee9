"""Prefill attention: rows with more than one query. One program takes a tile of a row's queries and one KV head.

    a tile of queries   16 tokens x 8 heads of the group = 128 rows of the product; all read the same keys
    keys of a row       |-------- past: through the table --------|-------- new: this step's tokens --------|
    for a tile          |---- visible to all queries -------------|- visible to all: no mask --|- diagonal -|

New keys and values are contiguous in this step's qkv; if the caller passes them, they are loaded by the tile, without reading
the table; the cache holds the same values. Tiles of keys are always split at the first new token, so all sources give
the same bits. A row of n queries has at most n // TOKENS + 1 tiles, so row r's tiles start at query_start[r] // TOKENS + r: the grid
depends only on the number of tokens and rows, and a program finds its row by bisection. The last tiles, which take longest, go first.

    lagging    scores of tile 1 | weights of 1, meanwhile values of 0 | scores of 2 | weights of 2, meanwhile values of 1 | ...

Tensor cores and exponentials run at the same time only if neither waits for the other. So a tile's values are mixed one step
late, while the weights of the next tile are computed; those of the last tile are mixed at the end.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention.common import HIDDEN, LN_2, begin, finish, load_lines, mix, places_of, score, weigh

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
def load_tile(
    source,
    table,
    kv_head,
    start,
    end,
    shift,
    region_size,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TOGETHER: tl.constexpr,
    SOURCE: tl.constexpr,
    STRIDE: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Loads keys or values from `start` on. SOURCE 'cache': slots through the table; 'tokens': token `shift + position` of [T, STRIDE];
    'tiles': the same by a descriptor, without an end check."""
    if SOURCE == "tiles":
        return source.load([shift + start, kv_head * DIM])
    else:
        position = start + tl.arange(0, TILE)
        inside = position < end
        if SOURCE == "tokens":
            place = (shift + position).to(tl.int64) * STRIDE + kv_head * DIM
        else:
            place = places_of(table, position, inside, kv_head, region_size, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER)
        return load_lines(source, place, inside, DIM, DIM_TILE, MASKED)


@triton.jit
def over_keys(
    queries,
    query_position,
    k_source,
    v_source,
    table,
    kv_head,
    first,
    low,
    high,
    end,
    shift,
    scale,
    unit,
    cap,
    slope,
    region_size,
    window,
    largest,
    total,
    mixed,
    weights,
    fade,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    SOURCE: tl.constexpr,
    STRIDE: tl.constexpr,
    SEEN: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    LAGGING: tl.constexpr,
):
    """Processes the keys from low to high; `first` is the start of this source's keys, and weights are zero before it.

    SEEN   'all': whole tiles visible to every query; 'inside': visible to every query up to end; 'causal': each query up to itself.
    """
    MASKED: tl.constexpr = WINDOWED or SEEN != "all"
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        keys = load_tile(
            k_source, table, kv_head, start, end, shift, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, SOURCE, STRIDE, MASKED, TILE,
        )  # fmt: skip
        position = start + tl.arange(0, TILE)
        behind = position[None, :] - query_position[:, None]
        scores = score(queries, keys, scale, cap, slope, behind, CAPPED, SLOPED)
        mixed_from = tl.maximum(start - TILE, first) if LAGGING else start
        values = load_tile(
            v_source, table, kv_head, mixed_from, end, shift, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, SOURCE, STRIDE, MASKED, TILE,
        )  # fmt: skip
        if LAGGING:
            mixed = mix(weights, fade, values, mixed)
        if MASKED:
            visible = behind <= 0 if SEEN == "causal" else (position < end)[None, :]
            if WINDOWED:
                visible &= behind > -window
            scores = tl.where(visible, scores, HIDDEN)
        largest, total, weights, fade = weigh(scores, largest, total, unit)
        if not LAGGING:
            mixed = mix(weights, fade, values, mixed)
    return largest, total, mixed, weights, fade


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
    sinks,
    slopes,
    k_new,
    v_new,
    k_tiles,
    v_tiles,
    scale,
    unit,
    cap,
    table_width,
    region_size,
    window,
    num_rows,
    Q_STRIDE: tl.constexpr,
    NEW_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TOGETHER: tl.constexpr,
    WITH_NEW: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    LAGGING: tl.constexpr,
):
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = LINES // GROUP
    row = row_of_tile(query_start, tile, num_rows, TOKENS)
    token = tl.load(query_start + row).to(tl.int32)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    offset = (tile - (token // TOKENS + row)).to(tl.int32) * TOKENS
    if (count <= 1) | (offset >= count):
        return  # for the decode kernel, or after the row's last tile

    end = tl.load(context_len + row).to(tl.int32)
    past = end - count
    shift = token - past
    line = tl.arange(0, LINES)
    query, head = offset + line // GROUP, kv_head * GROUP + line % GROUP
    present = (query < count) & (line < TOKENS * GROUP)
    at = token.to(tl.int64) + query
    queries = load_lines(q, at * Q_STRIDE + head * DIM, present, DIM, DIM_TILE, True)
    query_position = past + query
    table = tables + row.to(tl.int64) * table_width
    slope = tl.load(slopes + head, mask=present, other=0.0) if SLOPED else 0.0

    largest, total, mixed = begin(sinks, head, present, unit, LINES, DIM_TILE, WITH_SINKS)
    weights, fade = tl.zeros([LINES, TILE], tl.float32), tl.full([LINES], 1.0, tl.float32)
    earliest = past + offset  # position of the tile's first query
    last = tl.minimum(earliest + TOKENS, end)
    seen_from = tl.maximum(earliest - window + 1, 0) if WINDOWED else 0
    low = seen_from // TILE * TILE
    largest, total, mixed, weights, fade = over_keys(
        queries, query_position, k_cache, v_cache, table, kv_head, low, low, past, past, 0,
        scale, unit, cap, slope, region_size, window, largest, total, mixed, weights, fade,
        KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, "cache", 0, "inside", TILE, STAGES, LAGGING,
    )  # fmt: skip
    if LAGGING:
        if low < past:
            values = load_tile(
                v_cache, table, kv_head, low + (past - low - 1) // TILE * TILE, past, 0, region_size,
                KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, "cache", 0, True, TILE,
            )  # fmt: skip
            mixed = mix(weights, fade, values, mixed)
        weights, fade = tl.zeros([LINES, TILE], tl.float32), tl.full([LINES], 1.0, tl.float32)

    k_source, v_source = (k_new, v_new) if WITH_NEW else (k_cache, v_cache)
    SOURCE: tl.constexpr = "tokens" if WITH_NEW else "cache"
    if WINDOWED:
        first = past + tl.maximum(seen_from - past, 0) // TILE * TILE
        masked_from = first
    else:
        first = past
        masked_from = past + (offset + 1) // TILE * TILE
        k_whole, v_whole = (k_tiles, v_tiles) if DESCRIBED else (k_source, v_source)
        largest, total, mixed, weights, fade = over_keys(
            queries, query_position, k_whole, v_whole, table, kv_head, past, past, masked_from, end, shift,
            scale, unit, cap, slope, region_size, window, largest, total, mixed, weights, fade,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED,
            "tiles" if DESCRIBED else SOURCE, NEW_STRIDE, "all", TILE, STAGES, LAGGING,
        )  # fmt: skip
    largest, total, mixed, weights, fade = over_keys(
        queries, query_position, k_source, v_source, table, kv_head, first, masked_from, last, end, shift,
        scale, unit, cap, slope, region_size, window, largest, total, mixed, weights, fade,
        KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, SOURCE, NEW_STRIDE, "causal", TILE, STAGES, LAGGING,
    )  # fmt: skip
    if LAGGING:
        values = load_tile(
            v_source, table, kv_head, first + (last - first - 1) // TILE * TILE, end, shift, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, SOURCE, NEW_STRIDE, True, TILE,
        )  # fmt: skip
        mixed = mix(weights, fade, values, mixed)
    result, log_sum = finish(largest, total, mixed, unit)

    place = at * HEADS + head
    dim = tl.arange(0, DIM_TILE)
    tl.store(out + place[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=present[:, None] & (dim < DIM)[None, :])
    if WITH_LSE:
        tl.store(lse + place, log_sum * LN2, mask=present)
