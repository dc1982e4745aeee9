"""Attention whose bits do not depend on chunks, on other rows, or on how the work is divided.

    keys      | tile | tile | tile | tile | tile | ..       tiles begin at multiples of TILE
    pieces    |         piece 0          |    piece 1       pieces begin at multiples of PIECE; each has a softmax of its own

Pieces are joined in the order of their positions. A program computes all pieces of a query in sequence, or, while there are few rows of
one query, one piece, and the last program of such a row joins them: both do the same operations. Pieces that several rows share are
computed before, for all of them at once (`teams.py`). All keys are read from the cache, also the keys of this step. Sums over the keys of
a tile are products with ones, because a reduction adds in an order that depends on the tile's other dimension.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cache_layout import tokens_together
from octavo.kernels.triton.attention.common import LOG2_E, begin, load_lines
from octavo.kernels.triton.attention.decode_shares import AT_ALL, AT_ARRIVED, WORDS, decode_shares, load_depth, load_share
from octavo.kernels.triton.attention.prefill import row_of_tile
from octavo.kernels.triton.attention.tiles import MIN_DOT, multiprocessors
from octavo.kernels.triton.invariant.pieces import answer, begin_row, join, load_state, put_state, read_piece, read_pieces
from octavo.kernels.triton.invariant.teams import read_shared_pieces
from octavo.kernels.triton.invariant.tiles import decode_reading, keys_of, prefill_reading
from octavo.kernels.triton.pdl import begin as begin_pdl
from octavo.kernels.triton.pdl import use_pdl, wait
from octavo.layout import INVARIANT_PIECE
from octavo.step.share_words import DecodeShares, most_parts, most_shares
from octavo.step.team_words import Teams, most_levels

PIECE = INVARIANT_PIECE  # keys
PROGRAMS, SHARES = 4, 2  # decode: resident on a multiprocessor, and pieces for each of these that rows are split into at most


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
    SPLIT: tl.constexpr,
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
        KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, SPLIT, PIECE, TILE, STAGES,
    )  # fmt: skip
    answer(total, mixed, out, at * HEADS + head, present, DIM, DIM_TILE)


@triton.jit(do_not_specialize=["most_levels", "table_width", "region_size", "window"])
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
    levels,
    levels_state,
    most_levels,
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
    WITH_LEVELS: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A work item of a row with one query: all of its pieces, or one. left [most_parts, GROUP, DIM], left_state [most_parts, GROUP, 2]

    levels, levels_state: of shared pieces, as many as the share says
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
    query_position = tl.full([GROUP_TILE], 0, tl.int32) + (end - 1)
    table = tables + row.to(tl.int64) * table_width
    slope = tl.load(slopes + head, mask=present, other=0.0) if SLOPED else 0.0
    line = token.to(tl.int64) * HEADS + head
    depth = load_depth(shares, share) if WITH_LEVELS else 0
    before = levels, levels_state, most_levels, sinks, row, head, present, unit, depth
    if parts == 1:
        largest, total, mixed = begin_row(*before, HEADS, DIM, DIM_TILE, WITH_SINKS, WITH_LEVELS)
        largest, total, mixed = read_pieces(
            queries, query_position, k_cache, v_cache, table, kv_head, low, high, window, slope, largest, total, mixed,
            scale, unit, cap, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, False, PIECE, TILE, STAGES,
        )  # fmt: skip
        answer(total, mixed, out, line, present, DIM, DIM_TILE)
    else:
        piece_largest, piece_total, piece_mixed = read_piece(
            queries, query_position, k_cache, v_cache, table, kv_head, low, high, window, slope, scale, unit, cap, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, True, TILE, STAGES,
        )  # fmt: skip
        put_state(left, left_state, share.to(tl.int64) * GROUP + member, present, piece_largest, piece_total, piece_mixed, DIM, DIM_TILE)
        tl.debug_barrier()  # all threads must have stored their results before one signals
        part_0 = share - part * KV_HEADS
        arrived = shares + (1 + part_0) * WORDS + AT_ARRIVED
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(arrived, 0)
            largest, total, mixed = begin_row(*before, HEADS, DIM, DIM_TILE, WITH_SINKS, WITH_LEVELS)
            for one in range(parts):
                at = (part_0 + one * KV_HEADS).to(tl.int64) * GROUP + member
                piece_largest, piece_total, piece_mixed = load_state(left, left_state, at, present, DIM, DIM_TILE)
                largest, total, mixed = join(largest, total, mixed, piece_largest, piece_total, piece_mixed, unit)
            answer(total, mixed, out, line, present, DIM, DIM_TILE)


def invariant_shares(
    query_start: Tensor, context_len: Tensor, k_cache: Tensor, window: int | None, teams: Teams | None = None
) -> DecodeShares:
    """Lists the decode work of this step: whole rows, or their pieces while there are few. `teams`: not with a window, as in `shares_of`"""
    assert teams is None or window is None
    programs = PROGRAMS * multiprocessors(k_cache.device)
    return decode_shares(query_start, context_len, window, k_cache.shape[2], PIECE, programs, SHARES, 1, teams, aligned=True)


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
    tile = keys_of(q.dtype, dim)
    assert PIECE % tile == 0, "a tile may not reach into the next piece"
    shared: dict[str, Any] = {
        "Q_STRIDE": q.stride(0), "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_TILE": triton.next_power_of_2(dim),
        "BLOCK_SIZE": size if paged else 1, "PAGED": paged, "TOGETHER": tokens_together(k_cache), "WINDOWED": window is not None,
        "CAPPED": capped, "SLOPED": sloped, "WITH_SINKS": sinks is not None, "PIECE": PIECE, "TILE": tile,
    }  # fmt: skip
    numbers = scale, LOG2_E * (1.0 if capped or sloped else scale), soft_cap or 0.0, tables.stride(0), size, window or 0
    if max_query > 1:
        how = prefill_reading(q.dtype, dim)
        lines = max(how.queries, triton.next_power_of_2(heads // kv_heads))
        invariant_prefill[(len(q) // (lines * kv_heads // heads) + len(context_len), kv_heads)](
            q, k_cache, v_cache, tables, query_start, context_len, out, sinks, slopes, *numbers, len(context_len), **shared, LINES=lines,
            SPLIT=how.split, STAGES=how.stages, num_warps=how.warps,
        )  # fmt: skip
    levels: tuple[Tensor | None, Tensor | None] = (None, None)
    if shares.teams is not None:
        given = q, k_cache, v_cache, tables, query_start, context_len, sinks, slopes
        levels = read_shared_pieces(*given, shares.teams, numbers[:-1], shared)
    programs, group, how = PROGRAMS * multiprocessors(q.device), heads // kv_heads, decode_reading()
    most = most_shares(len(context_len), kv_heads, programs, SHARES)
    assert len(shares.lines) == most + 1, f"{len(shares.lines)} lines for {programs} programs, {len(context_len)} rows"
    left = torch.empty(most_parts(programs, SHARES), group, dim, dtype=torch.float32, device=q.device)
    state = torch.empty(*left.shape[:2], 2, dtype=torch.float32, device=q.device)
    parts = left, state, *levels, most_levels(len(context_len))
    invariant_decode[(most,)](
        q, k_cache, v_cache, tables, shares.lines, out, sinks, slopes, *parts, *numbers, **shared,
        WITH_LEVELS=shares.teams is not None, GROUP_TILE=max(triton.next_power_of_2(group), MIN_DOT), STAGES=how.stages, PDL=use_pdl(),
        num_warps=how.warps, launch_pdl=use_pdl(),
    )  # fmt: skip
    return out
