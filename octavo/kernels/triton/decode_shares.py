"""Divides decode attention into equal shares, once a step: who reads which keys of which row (`kernels/share_words.py`).

Every program counts all rows for itself, which takes it no longer than one alone would take, and then writes its own line: the row
that its share begins in knows that it does. The first one writes the header and the rows' lines too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.share_words import END, FIRST, IN_ALL, LINE, NEXT, PER_SHARE, ROW, START, TILES, TOKEN, num_lines

ROWS = 1024  # at once
NO_WINDOW = 2**31 - 1
AT_SHARE, AT_ALL, AT_START, AT_TILES, AT_TOKEN, AT_ROW, AT_FIRST, AT_END, AT_NEXT, WORDS = map(
    tl.constexpr, (PER_SHARE, IN_ALL, START, TILES, TOKEN, ROW, FIRST, END, NEXT, LINE)
)


@triton.jit
def load_line(shares, line):
    """(start, tiles, token, row, first, end, next)"""
    at = shares + line * WORDS
    return (
        tl.load(at + AT_START), tl.load(at + AT_TILES), tl.load(at + AT_TOKEN), tl.load(at + AT_ROW),
        tl.load(at + AT_FIRST), tl.load(at + AT_END), tl.load(at + AT_NEXT),
    )  # fmt: skip


@triton.jit
def put_lines(shares, line, mask, start, tiles, token, row, first, end, following):
    at = shares + line * WORDS
    tl.store(at + AT_START, start, mask=mask)
    tl.store(at + AT_TILES, tiles, mask=mask)
    tl.store(at + AT_TOKEN, token, mask=mask)
    tl.store(at + AT_ROW, row, mask=mask)
    tl.store(at + AT_FIRST, first, mask=mask)
    tl.store(at + AT_END, end, mask=mask)
    tl.store(at + AT_NEXT, following, mask=mask)


@triton.jit
def count_tiles(query_start, context_len, row, num_rows, window, TILE: tl.constexpr):
    """(tiles, token, first key, end) of each row; tiles are 0 where a row has not one query."""
    present = row < num_rows
    token = tl.load(query_start + row, mask=present, other=0).to(tl.int32)
    behind = tl.load(query_start + row + 1, mask=present, other=0).to(tl.int32)
    end = tl.load(context_len + row, mask=present, other=0).to(tl.int32)
    first = tl.maximum(end - window, 0)
    return tl.where(behind - token == 1, tl.maximum(tl.cdiv(end - first, TILE), 1), 0), token, first, end


@triton.jit(do_not_specialize=["num_rows", "window", "least"])
def share_out(
    query_start, context_len, shares, num_rows, window, least, KV_HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, ROWS)
    in_all = 0
    for at in range(0, num_rows, ROWS):
        tiles, _token, _first, _end = count_tiles(query_start, context_len, at + lane, num_rows, window, TILE)
        in_all += tl.sum(tiles, 0) * KV_HEADS
    share = tl.maximum(tl.cdiv(in_all, programs), least)
    begin = program * share
    if program == 0:
        tl.store(shares + AT_SHARE, share)
        tl.store(shares + AT_ALL, in_all)
    before = 0
    line = 1 + programs
    for at in range(0, num_rows, ROWS):
        tiles, token, first, end = count_tiles(query_start, context_len, at + lane, num_rows, window, TILE)
        has = tiles > 0
        start = before + (tl.cumsum(tiles, 0) - tiles) * KV_HEADS
        own = line + tl.cumsum(has.to(tl.int32), 0) - 1
        put_lines(shares, own, has & (program == 0), start, tiles, token, at + lane, first, end, own + 1)
        begun = (start <= begin) & (begin < start + tiles * KV_HEADS)
        put_lines(shares, 1 + program + lane * 0, begun, start, tiles, token, at + lane, first, end, own + 1)
        before += tl.sum(tiles, 0) * KV_HEADS
        line += tl.sum(has.to(tl.int32), 0)


def decode_shares(
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    window: int | None,
    kv_heads: int,
    tile: int,  # keys
    programs: int,
    least: int,  # tiles of a share
) -> Tensor:
    """[lines, LINE] int32"""
    rows = len(context_len)
    shares = torch.empty(num_lines(programs, rows), LINE, dtype=torch.int32, device=query_start.device)
    share_out[(programs,)](
        query_start, context_len, shares, rows, window or NO_WINDOW, least, KV_HEADS=kv_heads, TILE=tile, ROWS=ROWS, num_warps=4
    )
    return shares
