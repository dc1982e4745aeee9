"""Attention whose bits do not depend on chunks, on other rows, or on how the work is divided.

    keys      | tile | tile | tile | tile | tile | ..       tiles begin at multiples of TILE
    pieces    |         piece 0          |    piece 1       pieces begin at multiples of PIECE; each has a softmax of its own

Pieces are joined in the order of their positions. A program computes all pieces of a query in sequence, or, while there are few rows of
one query, one piece, and the last program of such a row joins them: both do the same operations. All keys are read from the cache, also
the keys of this step. Sums over the keys of a tile are products with ones, because a reduction adds in an order that depends on the tile's
other dimension.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cache_layout import tokens_together
from octavo.kernels.triton.attention.common import HIDDEN, LOG2_E, LOWEST, begin, load_lines, places_of, score
from octavo.kernels.triton.attention.decode import put
from octavo.kernels.triton.attention.decode_shares import AT_ALL, AT_ARRIVED, WORDS, decode_shares, load_share
from octavo.kernels.triton.attention.prefill import row_of_tile
from octavo.kernels.triton.attention.tiles import MIN_DOT, multiprocessors
from octavo.kernels.triton.pdl import begin as begin_pdl
from octavo.kernels.triton.pdl import use_pdl, wait
from octavo.kernels.triton.target import capability, is_roomy
from octavo.step.share_words import DecodeShares, most_parts, most_shares

PIECE = 256  # keys
PROGRAMS, SHARES = 4, 2  # decode: resident on a multiprocessor, and pieces for each of these that rows are split into at most
ONES = tl.constexpr(16)  # columns of the product that adds up weights


@triton.jit
def join(largest, total, mixed, more_largest, more_total, more_mixed, unit):
    """Joins the state of a piece to that of the pieces before it. One without visible keys changes nothing."""
    now = tl.maximum(largest, more_largest)
    fade, weight = tl.exp2((largest - now) * unit), tl.exp2((more_largest - now) * unit)
    return now, tl.fma(total, fade, more_total * weight), tl.fma(mixed, fade[:, None], more_mixed * weight[:, None])


@triton.jit
def read_piece(
    queries,
    query_position,
    k_cache,
    v_cache,
    table,
    kv_head,
    low,
    high,
    window,
    slope,
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
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(largest score, sum of weights, weighted values) over the keys of a piece that each query [N] sees"""
    N: tl.constexpr = queries.shape[0]
    kind: tl.constexpr = v_cache.dtype.element_ty
    ones = tl.full([TILE, ONES], 1.0, tl.float32).to(kind)
    largest = tl.full([N], LOWEST, tl.float32)
    totals = tl.zeros([N, ONES], tl.float32)
    mixed = tl.zeros([N, DIM_TILE], tl.float32)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        inside = position < high
        of_keys = places_of(table, position, inside, kv_head, region_size, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER)
        keys = load_lines(k_cache, of_keys, inside, DIM, DIM_TILE, True)
        behind = position[None, :] - query_position[:, None]
        visible = behind <= 0
        if WINDOWED:
            visible &= behind > -window
        scores = tl.where(visible, score(queries, keys, scale, cap, slope, behind, CAPPED, SLOPED), HIDDEN)
        values = load_lines(v_cache, of_keys, inside, DIM, DIM_TILE, True)
        now = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(tl.fma(scores, unit, -(now * unit)[:, None])).to(kind)
        fade = tl.exp2((largest - now) * unit)[:, None]
        totals = tl.dot(weights, ones, totals * fade, input_precision="ieee")
        mixed = tl.dot(weights, values, mixed * fade, input_precision="ieee")
        largest = now
    return largest, tl.max(totals, 1), mixed  # all columns of the totals are equal


@triton.jit
def read_pieces(
    queries,
    query_position,
    k_cache,
    v_cache,
    table,
    kv_head,
    low,
    high,
    window,
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
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Joins the pieces from `low`, where one begins, to `high`."""
    for piece in range(low, high, PIECE):
        piece_largest, piece_total, piece_mixed = read_piece(
            queries, query_position, k_cache, v_cache, table, kv_head, piece, tl.minimum(piece + PIECE, high), window, slope,
            scale, unit, cap, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, TILE, STAGES,
        )  # fmt: skip
        largest, total, mixed = join(largest, total, mixed, piece_largest, piece_total, piece_mixed, unit)
    return largest, total, mixed


@triton.jit
def answer(total, mixed, out, line, present, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Stores zeros for a query that sees no key."""
    put(out, line, present, mixed / tl.where(total > 0, total, 1.0)[:, None], DIM, DIM_TILE)


@triton.jit(do_not_specialize=["num_rows", "table_width", "region_size", "window"])
def invariant_prefill(
    q,
    k_cache,
    v_cache,
    tables,
    query_start,
    context_len,
    out,
    sinks,
    slopes,
    scale,
    unit,
    cap,
    table_width,
    region_size,
    window,
    num_rows,
    Q_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of queries of a row with several. Tiles with the most keys first."""
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
    line = tl.arange(0, LINES)
    query, head = offset + line // GROUP, kv_head * GROUP + line % GROUP
    present = (query < count) & (line < TOKENS * GROUP)
    at = token.to(tl.int64) + query
    queries = load_lines(q, at * Q_STRIDE + head * DIM, present, DIM, DIM_TILE, True)
    slope = tl.load(slopes + head, mask=present, other=0.0) if SLOPED else 0.0
    first = end - count + offset  # the position of the first query
    low = tl.maximum(first - window + 1, 0) // PIECE * PIECE if WINDOWED else 0
    largest, total, mixed = begin(sinks, head, present, unit, LINES, DIM_TILE, WITH_SINKS)
    largest, total, mixed = read_pieces(
        queries, end - count + query, k_cache, v_cache, tables + row.to(tl.int64) * table_width, kv_head, low,
        tl.minimum(first + TOKENS, end), window, slope, largest, total, mixed, scale, unit, cap, region_size,
        KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, PIECE, TILE, STAGES,
    )  # fmt: skip
    answer(total, mixed, out, at * HEADS + head, present, DIM, DIM_TILE)


@triton.jit(do_not_specialize=["table_width", "region_size", "window"])
def invariant_decode(
    q,
    k_cache,
    v_cache,
    tables,
    shares,
    out,
    sinks,
    slopes,
    left,
    left_state,
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
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A work item of a row with one query: all of its pieces, or one. left [most_parts, GROUP, DIM], left_state [most_parts, GROUP, 2]"""
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
    query_position = tl.full([GROUP_TILE], 0, tl.int32) + (end - 1)
    table = tables + row.to(tl.int64) * table_width
    slope = tl.load(slopes + head, mask=present, other=0.0) if SLOPED else 0.0
    line = token.to(tl.int64) * HEADS + head
    largest, total, mixed = begin(sinks, head, present, unit, GROUP_TILE, DIM_TILE, WITH_SINKS)
    if parts == 1:
        largest, total, mixed = read_pieces(
            queries, query_position, k_cache, v_cache, table, kv_head, low, high, window, slope, largest, total, mixed,
            scale, unit, cap, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, PIECE, TILE, STAGES,
        )  # fmt: skip
        answer(total, mixed, out, line, present, DIM, DIM_TILE)
    else:
        piece_largest, piece_total, piece_mixed = read_piece(
            queries, query_position, k_cache, v_cache, table, kv_head, low, high, window, slope, scale, unit, cap, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, TILE, STAGES,
        )  # fmt: skip
        at = share.to(tl.int64) * GROUP + member
        put(left, at, present, piece_mixed, DIM, DIM_TILE)
        tl.store(left_state + 2 * at, piece_largest, mask=present)
        tl.store(left_state + 2 * at + 1, piece_total, mask=present)
        tl.debug_barrier()  # all threads must have stored their results before one signals
        part_0 = share - part * KV_HEADS
        arrived = shares + (1 + part_0) * WORDS + AT_ARRIVED
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(arrived, 0)
            dim = tl.arange(0, DIM_TILE)
            for one in range(parts):  # other programs stored them, so loads bypass the L1 cache
                at = (part_0 + one * KV_HEADS).to(tl.int64) * GROUP + member
                piece_largest = tl.load(left_state + 2 * at, mask=present, other=LOWEST, cache_modifier=".cg")
                piece_total = tl.load(left_state + 2 * at + 1, mask=present, other=0.0, cache_modifier=".cg")
                pointers, inside = left + at[:, None] * DIM + dim[None, :], present[:, None] & (dim < DIM)[None, :]
                piece_mixed = tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
                largest, total, mixed = join(largest, total, mixed, piece_largest, piece_total, piece_mixed, unit)
            answer(total, mixed, out, line, present, DIM, DIM_TILE)


def invariant_shares(query_start: Tensor, context_len: Tensor, k_cache: Tensor, window: int | None) -> DecodeShares:
    """Lists the decode work of this step: whole rows, or their pieces while there are few."""
    programs = PROGRAMS * multiprocessors(k_cache.device)
    return decode_shares(query_start, context_len, window, k_cache.shape[2], PIECE, programs, SHARES, grain=1, aligned=True)


def invariant_attention(
    q: Tensor,  # [T, heads, head_dim]; tokens may be strided, as q is inside qkv
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    scale: float,
    out: Tensor,  # [T, heads, head_dim]
    max_query: int,
    shares: DecodeShares,  # from `invariant_shares`
    window: int | None = None,
    paged: bool = True,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
    slopes: Tensor | None = None,  # [heads] float32: ALiBi
) -> Tensor:
    """Fills and returns `out`. Takes the arguments of `paged_attention` (`kernels/ops.py`)."""
    (heads, dim), (size, kv_heads) = q.shape[1:], k_cache.shape[1:3]
    if not len(q):
        return out
    capped, sloped = soft_cap is not None, slopes is not None
    tile = tile_of(q.dtype, dim)
    assert PIECE % tile == 0, "a tile may not reach into the next piece"
    shared: dict[str, Any] = {
        "Q_STRIDE": q.stride(0), "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_TILE": triton.next_power_of_2(dim),
        "BLOCK_SIZE": size if paged else 1, "PAGED": paged, "TOGETHER": tokens_together(k_cache), "WINDOWED": window is not None,
        "CAPPED": capped, "SLOPED": sloped, "WITH_SINKS": sinks is not None, "PIECE": PIECE, "TILE": tile,
    }  # fmt: skip
    numbers = scale, LOG2_E * (1.0 if capped or sloped else scale), soft_cap or 0.0, tables.stride(0), size, window or 0
    if max_query > 1:
        lines = max(prefill_lines(q.dtype, dim), triton.next_power_of_2(heads // kv_heads))
        invariant_prefill[(len(q) // (lines * kv_heads // heads) + len(context_len), kv_heads)](
            q, k_cache, v_cache, tables, query_start, context_len, out, sinks, slopes, *numbers, len(context_len), **shared, LINES=lines,
            STAGES=2, num_warps=8,
        )  # fmt: skip
    programs, group = PROGRAMS * multiprocessors(q.device), heads // kv_heads
    most = most_shares(len(context_len), kv_heads, programs, SHARES)
    assert len(shares.lines) == most + 1, f"{len(shares.lines)} lines for {programs} programs, {len(context_len)} rows"
    left = torch.empty(most_parts(programs, SHARES), group, dim, dtype=torch.float32, device=q.device)
    state = torch.empty(*left.shape[:2], 2, dtype=torch.float32, device=q.device)
    invariant_decode[(most,)](
        q, k_cache, v_cache, tables, shares.lines, out, sinks, slopes, left, state, *numbers, **shared,
        GROUP_TILE=max(triton.next_power_of_2(group), MIN_DOT), STAGES=2, PDL=use_pdl(),
        num_warps=4 if is_roomy(capability()) else 8, launch_pdl=use_pdl(),
    )  # fmt: skip
    return out


def prefill_lines(dtype: torch.dtype, head_dim: int) -> int:
    """Returns the queries of a prefill tile: as many as fit into the registers."""
    if dtype == torch.float32 or not is_roomy(capability()):
        return 32
    return 128 if head_dim <= 128 else 64


def tile_of(dtype: torch.dtype, head_dim: int) -> int:
    """Returns the keys of a tile, which change the result: they do not depend on the GPU."""
    return 16 if dtype == torch.float32 else 32 if head_dim > 128 else 64
