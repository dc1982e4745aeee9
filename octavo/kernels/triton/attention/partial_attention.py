"""Attention over the keys stored on one of several ranks (`kernels/reference/partial_attention.py` has a drawing).

One kernel for rows of one query and of more: a program takes a tile of a row's queries with the heads that share a KV head, and
reads the rank's keys up to the last one visible to any of them. Masks use the true position of a key.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cache_layout import tokens_together
from octavo.kernels.triton.attention.common import HIDDEN, LN_2, LOG2_E, begin, finish, load_lines, mix, places_of, score, weigh
from octavo.kernels.triton.attention.prefill import row_of_tile

LN2 = tl.constexpr(LN_2)
QUERIES, KEYS = 32, 32  # in a tile; each head of a token counts as a query


@triton.jit(do_not_specialize=["num_rows", "table_width", "window", "rank"])
def attend_partly(
    q,
    k_cache,
    v_cache,
    tables,
    query_start,
    context_len,
    out,
    lse,
    scale,
    unit,
    cap,
    table_width,
    window,
    num_rows,
    rank,
    RANKS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = LINES // GROUP
    row = row_of_tile(query_start, tile, num_rows, TOKENS)
    token = tl.load(query_start + row).to(tl.int32)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    offset = (tile - (token // TOKENS + row)).to(tl.int32) * TOKENS
    if offset >= count:
        return  # after the row's last tile

    end = tl.load(context_len + row).to(tl.int32)
    line = tl.arange(0, LINES)
    query, head = offset + line // GROUP, kv_head * GROUP + line % GROUP
    present = (query < count) & (line < TOKENS * GROUP)
    at = token.to(tl.int64) + query
    queries = load_lines(q, at * Q_STRIDE + head * DIM, present, DIM, DIM_TILE, True)
    query_position = end - count + query
    table = tables + row.to(tl.int64) * table_width

    last = tl.minimum(end - count + offset + TOKENS, end)  # visible keys end here
    SPAN: tl.constexpr = BLOCK_SIZE * RANKS
    rest = tl.minimum(tl.maximum(last % SPAN - rank * BLOCK_SIZE, 0), BLOCK_SIZE)
    kept = last // SPAN * BLOCK_SIZE + rest
    largest, total, mixed = begin(q, head, present, unit, LINES, DIM_TILE, False)
    for start in range(0, kept, TILE):
        index = start + tl.arange(0, TILE)
        inside = index < kept
        place = places_of(table, index, inside, kv_head, 0, KV_HEADS, DIM, BLOCK_SIZE, True, TOGETHER)
        keys = load_lines(k_cache, place, inside, DIM, DIM_TILE, True)
        position = (index // BLOCK_SIZE * RANKS + rank) * BLOCK_SIZE + index % BLOCK_SIZE
        behind = position[None, :] - query_position[:, None]
        scores = score(queries, keys, scale, cap, 0.0, behind, CAPPED, False)
        visible = inside[None, :] & (behind <= 0)
        if WINDOWED:
            visible &= behind > -window
        largest, total, weights, fade = weigh(tl.where(visible, scores, HIDDEN), largest, total, unit)
        mixed = mix(weights, fade, load_lines(v_cache, place, inside, DIM, DIM_TILE, True), mixed)
    result, log_sum = finish(largest, total, mixed, unit)

    place = at * HEADS + head
    dim = tl.arange(0, DIM_TILE)
    tl.store(out + place[:, None] * DIM + dim[None, :], result, mask=present[:, None] & (dim < DIM)[None, :])
    tl.store(lse + place, log_sum * LN2, mask=present)


def partial_attention(
    q: Tensor,  # [T, heads, head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim] in any layout: on this rank
    v_cache: Tensor,
    tables: Tensor,  # [R, B]: of blocks that cover `ranks` times as many tokens
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]: tokens, on all ranks
    scale: float,
    rank: int,
    ranks: int,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    heads, head_dim = q.shape[1:]
    size, kv_heads = k_cache.shape[1:3]
    assert heads % kv_heads == 0 and q.stride()[1:] == (head_dim, 1) and tables.stride(1) == 1 and scale > 0
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride()
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    group, rows = heads // kv_heads, len(context_len)
    unit, cap = LOG2_E * (scale if soft_cap is None else 1.0), soft_cap or 0.0
    lines = max(QUERIES, triton.next_power_of_2(group))
    if len(q):
        attend_partly[(len(q) // (lines // group) + rows, kv_heads)](
            q, k_cache, v_cache, tables, query_start, context_len, out, lse, scale, unit, cap, tables.stride(0), window or 0, rows,
            rank, RANKS=ranks, Q_STRIDE=q.stride(0), HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim,
            DIM_TILE=max(triton.next_power_of_2(head_dim), 16), LINES=lines, BLOCK_SIZE=size, TOGETHER=tokens_together(k_cache),
            WINDOWED=window is not None, CAPPED=soft_cap is not None, TILE=KEYS, num_warps=4,
        )  # fmt: skip
    return out, lse
