"""Latent attention whose bits for a row do not depend on chunks, on other rows, or on how the work is divided (`invariant/attention.py`).

    keys      | tile | tile | tile | tile | tile | ..       tiles begin at multiples of TILE
    pieces    |         piece 0          |    piece 1       pieces begin at multiples of PIECE, and are joined in their order

Prompts and decode have the same tiles of keys, and as many lines: results of a piece and of those before it are both in registers. The
products of each head have one sum for each number of the result, to which columns are added in ascending order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.attention.common import HIDDEN, LOG2_E, LOWEST, slots_of
from octavo.kernels.triton.attention.decode import put
from octavo.kernels.triton.attention.decode_shares import AT_ALL, AT_ARRIVED, WORDS, decode_shares, load_share
from octavo.kernels.triton.attention.prefill import row_of_tile
from octavo.kernels.triton.attention.tiles import multiprocessors
from octavo.kernels.triton.invariant.pieces import ONES, answer, join
from octavo.kernels.triton.latent.attention import load_both
from octavo.kernels.triton.latent.inputs import write_latent
from octavo.kernels.triton.latent.launch import check, shape_of
from octavo.kernels.triton.latent.tiles import LatentTiles, has_room, head_groups
from octavo.kernels.triton.pdl import begin as begin_pdl
from octavo.kernels.triton.pdl import use_pdl, wait
from octavo.kernels.triton.target import capability
from octavo.layout import INVARIANT_PIECE
from octavo.step.share_words import DecodeShares, most_parts, most_shares

PIECE = INVARIANT_PIECE  # keys


def invariant_tiles(dtype: torch.dtype, arch: int) -> LatentTiles:
    if dtype == torch.float32:
        return LatentTiles(lines=16, keys=16, warps=8, stages=1)
    return LatentTiles(lines=32, keys=32 if has_room(arch) else 16, warps=8, stages=3)


@triton.jit
def read_piece(
    latent_q,
    rotary_q,
    query_position,
    cache,
    table,
    low,
    high,
    region_size,
    unit,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROTARY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(largest score, sum of weights, weighted latents) over the keys of a piece that each query [N] sees"""
    LINES: tl.constexpr = latent_q.shape[0]
    kind: tl.constexpr = cache.dtype.element_ty
    ones = tl.full([TILE, ONES], 1.0, tl.float32).to(kind)
    largest = tl.full([LINES], LOWEST, tl.float32)
    totals = tl.zeros([LINES, ONES], tl.float32)
    mixed = tl.zeros([LINES, RANK_TILE], tl.float32)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        inside = position < high
        place = slots_of(table, position, inside, region_size, BLOCK_SIZE, PAGED) * (RANK + ROTARY)
        latents, rotary = load_both(cache, place, inside, RANK, ROTARY, RANK_TILE, ROTARY_TILE)
        scores = tl.dot(latent_q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rotary_q, tl.trans(rotary), scores, input_precision="ieee")
        scores = tl.where(position[None, :] <= query_position[:, None], scores, HIDDEN)
        now = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(tl.fma(scores, unit, -(now * unit)[:, None])).to(kind)
        fade = tl.exp2((largest - now) * unit)[:, None]
        totals = tl.dot(weights, ones, totals * fade, input_precision="ieee")
        mixed = tl.dot(weights, latents, mixed * fade, input_precision="ieee")
        largest = now
    return largest, tl.max(totals, 1), mixed  # all columns of the totals are equal


@triton.jit
def read_pieces(
    latent_q,
    rotary_q,
    query_position,
    cache,
    table,
    low,
    high,
    region_size,
    unit,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROTARY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(sum of weights, weighted latents) of the pieces from `low`, where one begins, to `high`"""
    LINES: tl.constexpr = latent_q.shape[0]
    largest, total, mixed = tl.full([LINES], LOWEST, tl.float32), tl.zeros([LINES], tl.float32), tl.zeros([LINES, RANK_TILE], tl.float32)
    for piece in range(low, high, PIECE):
        piece_largest, piece_total, piece_mixed = read_piece(
            latent_q, rotary_q, query_position, cache, table, piece, tl.minimum(piece + PIECE, high), region_size, unit,
            RANK, ROTARY, RANK_TILE, ROTARY_TILE, BLOCK_SIZE, PAGED, TILE, STAGES,
        )  # fmt: skip
        largest, total, mixed = join(largest, total, mixed, piece_largest, piece_total, piece_mixed, unit)
    return total, mixed


@triton.jit(do_not_specialize=["num_rows", "table_width", "region_size"])
def invariant_latent_prefill(
    q,
    cache,
    tables,
    query_start,
    context_len,
    out,
    unit,
    table_width,
    region_size,
    num_rows,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROTARY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    LINES: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like `latent_prefill`."""
    tile, group = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // GROUPS
    TOKENS: tl.constexpr = LINES // GROUP
    row = row_of_tile(query_start, tile, num_rows, TOKENS)
    token = tl.load(query_start + row).to(tl.int32)
    count = (tl.load(query_start + row + 1) - token).to(tl.int32)
    offset = (tile - (token // TOKENS + row)).to(tl.int32) * TOKENS
    if (count <= 1) | (offset >= count):
        return  # for the decode kernel, or after the row's last tile
    past = tl.load(context_len + row).to(tl.int32) - count
    number = tl.arange(0, LINES)
    query = offset + number // GROUP
    present = (query < count) & (number < TOKENS * GROUP)
    line = (token.to(tl.int64) + query) * HEADS + group * GROUP + number % GROUP
    latent_q, rotary_q = load_both(q, line * (RANK + ROTARY), present, RANK, ROTARY, RANK_TILE, ROTARY_TILE)
    total, mixed = read_pieces(
        latent_q, rotary_q, past + query, cache, tables + row.to(tl.int64) * table_width, 0, past + tl.minimum(offset + TOKENS, count),
        region_size, unit, RANK, ROTARY, RANK_TILE, ROTARY_TILE, BLOCK_SIZE, PAGED, PIECE, TILE, STAGES,
    )  # fmt: skip
    answer(total, mixed, out, line, present, RANK, RANK_TILE)


@triton.jit(do_not_specialize=["table_width", "region_size"])
def invariant_latent_decode(
    q,
    cache,
    tables,
    shares,
    out,
    left,
    left_state,
    unit,
    table_width,
    region_size,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROTARY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    LINES: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A work item of a row with one query: all of its pieces, or one. left [most_parts, GROUP, RANK], left_state [most_parts, GROUP, 2]"""
    begin_pdl(PDL)
    wait(PDL)
    share = tl.program_id(0)
    if share >= tl.load(shares + AT_ALL):
        return
    GROUP: tl.constexpr = HEADS // GROUPS
    token, row, group, low, high, end, part, parts = load_share(shares, share)
    member = tl.arange(0, LINES)
    present = member < GROUP
    line = token.to(tl.int64) * HEADS + group * GROUP + member
    latent_q, rotary_q = load_both(q, line * (RANK + ROTARY), present, RANK, ROTARY, RANK_TILE, ROTARY_TILE)
    position, table = tl.full([LINES], 0, tl.int32) + (end - 1), tables + row.to(tl.int64) * table_width
    if parts == 1:
        total, mixed = read_pieces(
            latent_q, rotary_q, position, cache, table, low, high, region_size, unit,
            RANK, ROTARY, RANK_TILE, ROTARY_TILE, BLOCK_SIZE, PAGED, PIECE, TILE, STAGES,
        )  # fmt: skip
        answer(total, mixed, out, line, present, RANK, RANK_TILE)
    else:
        piece_largest, piece_total, piece_mixed = read_piece(
            latent_q, rotary_q, position, cache, table, low, high, region_size, unit,
            RANK, ROTARY, RANK_TILE, ROTARY_TILE, BLOCK_SIZE, PAGED, TILE, STAGES,
        )  # fmt: skip
        at = share.to(tl.int64) * GROUP + member
        put(left, at, present, piece_mixed, RANK, RANK_TILE)
        tl.store(left_state + 2 * at, piece_largest, mask=present)
        tl.store(left_state + 2 * at + 1, piece_total, mask=present)
        tl.debug_barrier()  # all threads must have stored their results before one signals
        part_0 = share - part * GROUPS
        arrived = shares + (1 + part_0) * WORDS + AT_ARRIVED
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(arrived, 0)
            total, mixed = join_parts(left, left_state, part_0.to(tl.int64), parts, present, unit, GROUP, GROUPS, RANK, RANK_TILE, LINES)
            answer(total, mixed, out, line, present, RANK, RANK_TILE)


@triton.jit
def join_parts(
    left, left_state, part_0, parts, present, unit,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """(sum of weights, weighted latents) of all parts. Other programs stored them, so loads bypass the L1 cache."""
    dim, member = tl.arange(0, RANK_TILE), tl.arange(0, LINES)
    largest, total, mixed = tl.full([LINES], LOWEST, tl.float32), tl.zeros([LINES], tl.float32), tl.zeros([LINES, RANK_TILE], tl.float32)
    for one in range(parts):
        at = (part_0 + one * GROUPS) * GROUP + member
        piece_largest = tl.load(left_state + 2 * at, mask=present, other=LOWEST, cache_modifier=".cg")
        piece_total = tl.load(left_state + 2 * at + 1, mask=present, other=0.0, cache_modifier=".cg")
        inside = present[:, None] & (dim < RANK)[None, :]
        piece_mixed = tl.load(left + at[:, None] * RANK + dim[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        largest, total, mixed = join(largest, total, mixed, piece_largest, piece_total, piece_mixed, unit)
    return total, mixed


def invariant_latent_shares(query_start: Tensor, context_len: Tensor, cache: Tensor, heads: int) -> DecodeShares:
    """Lists the decode work of this step: whole rows, or their pieces while there are few."""
    tiles = invariant_tiles(cache.dtype, capability())
    programs = tiles.programs * multiprocessors(cache.device)
    groups = head_groups(heads, tiles.lines)
    return decode_shares(query_start, context_len, None, groups, PIECE, programs, tiles.shares, grain=1, aligned=True)


def invariant_latent_attention(
    q: Tensor, cache: Tensor, tables: Tensor, query_start: Tensor, context_len: Tensor, scale: float, out: Tensor, max_query: int,
    shares: DecodeShares, paged: bool = True,
) -> Tensor:  # fmt: skip
    """Takes the arguments of `latent_attention`. shares: from `invariant_latent_shares`"""
    check(q, cache, tables, out, paged)
    if not len(q):
        return out
    rows, tiles = len(context_len), invariant_tiles(q.dtype, capability())
    assert PIECE % tiles.keys == 0, "a tile may not reach into the next piece"
    groups = head_groups(q.shape[1], tiles.lines)
    group, programs = q.shape[1] // groups, tiles.programs * multiprocessors(q.device)
    shared: dict[str, Any] = shape_of(q, cache, out, paged) | {
        "GROUPS": groups, "LINES": tiles.lines, "PIECE": PIECE, "TILE": tiles.keys, "STAGES": tiles.stages, "num_warps": tiles.warps,
    }  # fmt: skip
    numbers = scale * LOG2_E, tables.stride(0), cache.shape[1]
    if max_query > 1:
        invariant_latent_prefill[(len(q) // (tiles.lines // group) + rows, groups)](
            q, cache, tables, query_start, context_len, out, *numbers, rows, **shared
        )
    most = most_shares(rows, groups, programs, tiles.shares)
    assert len(shares.lines) == most + 1, f"{len(shares.lines)} lines for {programs} programs, {rows} rows"
    left = torch.empty(most_parts(programs, tiles.shares), group, shared["RANK"], dtype=torch.float32, device=q.device)
    state = torch.empty(*left.shape[:2], 2, dtype=torch.float32, device=q.device)
    invariant_latent_decode[(most,)](
        q, cache, tables, shares.lines, out, left, state, *numbers, **shared, PDL=use_pdl(), launch_pdl=use_pdl()
    )  # fmt: skip
    return out


# -- the products of each head


@triton.jit(do_not_specialize=["tokens"])
def multiply_heads(
    x,
    weight,
    out,
    tokens,
    X_STRIDE: tl.constexpr,
    X_HEAD: tl.constexpr,
    W_COLUMN: tl.constexpr,
    W_STEP: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, h, n] = the sum of x[t, h, k] * weight[h, n, k], which has SIZE * WIDE numbers for each head"""
    begin_pdl(PDL)
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(2).to(tl.int64)
    column, k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)[None, :]
    inside = (row < tokens)[:, None]
    line_of_x = x + head * X_HEAD + row.to(tl.int64)[:, None] * X_STRIDE + k
    line_of_w = weight + head * (SIZE * WIDE) + column[:, None] * W_COLUMN + k * W_STEP
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    wait(PDL)
    for start in tl.range(0, SIZE, STEP, num_stages=STAGES):
        within = start + k < SIZE
        matrix = tl.load(line_of_w + start * W_STEP, mask=within & (column < WIDE)[:, None], other=0.0)
        given = tl.load(line_of_x + start, mask=within & inside, other=0.0)
        total = tl.dot(matrix, tl.trans(given), total, input_precision="ieee")
    at = out + head * OUT_HEAD + row.to(tl.int64)[:, None] * OUT_STRIDE + column[None, :]
    tl.store(at, tl.trans(total.to(out.dtype.element_ty)), mask=inside & (column < WIDE)[None, :])


def by_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [heads, T, wide] = x [heads, T, size] times weight [heads, size, wide], any of which may be a transposed view"""
    (heads, tokens, size), wide = x.shape, out.shape[2]
    assert x.stride(2) == 1 and out.stride(2) == 1 and weight.stride(0) == size * wide
    wide_tile, step = (32, 32) if x.dtype == torch.float32 else (64, 64)
    rows = 16 if tokens <= 16 else 32 if x.dtype == torch.float32 else 64
    multiply_heads[(triton.cdiv(tokens, rows), triton.cdiv(wide, wide_tile), heads)](
        x, weight, out, tokens, X_STRIDE=x.stride(1), X_HEAD=x.stride(0), W_COLUMN=weight.stride(2), W_STEP=weight.stride(1),
        OUT_STRIDE=out.stride(1), OUT_HEAD=out.stride(0), SIZE=size, WIDE=wide, ROWS=rows, COLUMNS=wide_tile, STEP=step, STAGES=3,
        PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
    )  # fmt: skip


def invariant_write_latent(
    q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor,
    cache: Tensor,
) -> Tensor:  # fmt: skip
    """Takes the arguments of `write_latent`."""
    return write_latent(q, kv, k_up, norm, cos, sin, positions, slots, cache, by_head)


def invariant_expand(mixed: Tensor, v_up: Tensor) -> Tensor:
    """Takes the arguments of `expand`."""
    (tokens, heads, rank), size = mixed.shape, len(v_up) // mixed.shape[1]
    out = torch.empty(tokens, heads, size, dtype=mixed.dtype, device=mixed.device)
    if tokens:
        by_head(mixed.transpose(0, 1), v_up.view(heads, size, rank).transpose(1, 2), out.transpose(0, 1))
    return out.flatten(1)
