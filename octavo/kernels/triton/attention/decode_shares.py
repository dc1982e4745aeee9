"""Divides decode attention into split-KV work items, once per step (`step/share_words.py`).

There is one program for each row. It counts all rows by itself, which takes no longer than if one program did it, and then writes the
lines of its own row, which come after those of all longer rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.step.share_words import (
    ARRIVED,
    DEPTH,
    END,
    HIGH,
    IN_ALL,
    KV_HEAD,
    LINE,
    LOW,
    PART,
    PARTS,
    ROW,
    TOKEN,
    DecodeShares,
    most_shares,
)
from octavo.step.team_words import ENTRY, LEVELS, OWN, Teams

ROWS, LINES = 1024, 128  # processed at once
NO_WINDOW = 2**31 - 1
AT_ALL, AT_ARRIVED, AT_DEPTH, WORDS = map(tl.constexpr, (IN_ALL, ARRIVED, DEPTH, LINE))
AT_OWN, AT_LEVELS, ENTRY_WORDS = map(tl.constexpr, (OWN, LEVELS, ENTRY))
AT_TOKEN, AT_ROW, AT_KV_HEAD, AT_LOW, AT_HIGH, AT_END, AT_PART, AT_PARTS = map(
    tl.constexpr, (TOKEN, ROW, KV_HEAD, LOW, HIGH, END, PART, PARTS)
)


@triton.jit
def load_share(shares, share):
    """(token, row, KV head, low, high, end, part, parts)"""
    at = shares + (1 + share) * WORDS
    return (
        tl.load(at + AT_TOKEN), tl.load(at + AT_ROW), tl.load(at + AT_KV_HEAD), tl.load(at + AT_LOW),
        tl.load(at + AT_HIGH), tl.load(at + AT_END), tl.load(at + AT_PART), tl.load(at + AT_PARTS),
    )  # fmt: skip


@triton.jit
def load_depth(shares, share):
    return tl.load(shares + (1 + share) * WORDS + AT_DEPTH)


@triton.jit
def count_tiles(
    query_start,
    context_len,
    entries,
    row,
    num_rows,
    num_teams,
    window,
    TILE: tl.constexpr,
    WITH_TEAMS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """(tiles, token, first key, end) of each row; tiles is 0 for a row that does not have exactly one query."""
    present = row < num_rows
    token = tl.load(query_start + row, mask=present, other=0).to(tl.int32)
    behind = tl.load(query_start + row + 1, mask=present, other=0).to(tl.int32)
    end = tl.load(context_len + row, mask=present, other=0).to(tl.int32)
    first = tl.maximum(end - window, 0)
    if ALIGNED:
        first = first // TILE * TILE
    if WITH_TEAMS:
        first = tl.maximum(first, tl.load(entries + row * ENTRY_WORDS + AT_OWN, mask=present & (num_teams > 0), other=0))
    return tl.where(behind - token == 1, tl.maximum(tl.cdiv(end - first, TILE), 1), 0), token, first, end


@triton.jit
def cut(tiles, longest):
    """(parts of a row, tiles of a part)"""
    size = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, longest), 1))
    return tl.cdiv(tiles, tl.maximum(size, 1)), size


@triton.jit(do_not_specialize=["num_rows", "window", "programs", "each", "grain"])
def share_out(
    query_start,
    context_len,
    entries,
    teams,
    shares,
    num_rows,
    window,
    programs,
    each,
    grain,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    WITH_TEAMS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.program_id(0)
    num_teams = tl.load(teams) if WITH_TEAMS else 0
    lane = tl.arange(0, ROWS)
    in_all = 0
    for at in range(0, num_rows, ROWS):
        tiles, _token, _first, _end = count_tiles(
            query_start, context_len, entries, at + lane, num_rows, num_teams, window, TILE, WITH_TEAMS, ALIGNED
        )
        in_all += tl.sum(tiles, 0) * KV_HEADS
    if ALIGNED:
        longest = tl.where(in_all <= programs * each, 1, in_all)
    else:
        longest = tl.cdiv(in_all, programs * tl.minimum(tl.maximum(in_all // (programs * grain), 1), each))

    own, token, first, end = count_tiles(query_start, context_len, entries, row, num_rows, num_teams, window, TILE, WITH_TEAMS, ALIGNED)
    before, num_shares = 0, 0
    for at in range(0, num_rows, ROWS):
        tiles, _token, _first, _end = count_tiles(
            query_start, context_len, entries, at + lane, num_rows, num_teams, window, TILE, WITH_TEAMS, ALIGNED
        )
        parts, _size = cut(tiles, longest)
        sooner = (tiles > own) | ((tiles == own) & (at + lane < row))
        before += tl.sum(tl.where(sooner, parts, 0), 0) * KV_HEADS
        num_shares += tl.sum(parts, 0) * KV_HEADS
    if row == 0:
        tl.store(shares + AT_ALL, num_shares)

    parts, size = cut(own, longest)
    depth = tl.load(entries + row * ENTRY_WORDS + AT_LEVELS, mask=num_teams > 0, other=0) if WITH_TEAMS else 0
    for start in range(0, parts * KV_HEADS, LINES):
        index = start + tl.arange(0, LINES)
        mask = index < parts * KV_HEADS
        part = index // KV_HEADS
        low = first + part * size * TILE
        line = shares + (1 + before + index) * WORDS
        tl.store(line + AT_TOKEN, token, mask=mask)
        tl.store(line + AT_ROW, row, mask=mask)
        tl.store(line + AT_KV_HEAD, index % KV_HEADS, mask=mask)
        tl.store(line + AT_LOW, low, mask=mask)
        tl.store(line + AT_HIGH, tl.minimum(low + size * TILE, end), mask=mask)
        tl.store(line + AT_END, end, mask=mask)
        tl.store(line + AT_PART, part, mask=mask)
        tl.store(line + AT_PARTS, parts, mask=mask)
        tl.store(line + AT_ARRIVED, 0, mask=mask)
        tl.store(line + AT_DEPTH, depth, mask=mask)


def decode_shares(
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    window: int | None,
    kv_heads: int,
    tile: int,  # keys
    programs: int,  # programs that a GPU runs at once
    each: int,  # maximum work items for each of them that rows are split into
    grain: int,  # tiles of a work item: there are more items as soon as each program would read twice as many tiles
    teams: Teams | None = None,
    aligned: bool = False,  # tiles begin at multiples of `tile`, and a work item is one tile, or a whole row if there are many
) -> DecodeShares:
    rows = len(context_len)
    lines = 1 + most_shares(rows, kv_heads, programs, each)
    shares = torch.empty(lines, LINE, dtype=torch.int32, device=query_start.device)
    share_out[(rows,)](
        query_start, context_len, *(teams or (None, None)), shares, rows, window or NO_WINDOW, programs, each, grain,
        KV_HEADS=kv_heads, TILE=tile, ROWS=ROWS, LINES=LINES, WITH_TEAMS=teams is not None, ALIGNED=aligned,
        num_warps=4,
    )  # fmt: skip
    return DecodeShares(shares, teams)
