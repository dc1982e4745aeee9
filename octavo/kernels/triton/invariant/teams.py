"""Shared pieces of cascade (shared-prefix) groups, before each row reads its own keys with the decode kernel (`step/team_words.py`).

    row's keys   | piece 0 | piece 1 | piece 2 | piece 3 | own keys ..     shared with other rows: pieces 0 to 3
    levels       |       level 0     | level 1 | level 2 |                 results of a row, which the decode kernel goes on from

A program computes a group and a KV head: the queries of all rows of the group use each tile of keys. The numbers of a line of a product
do not depend on its other lines, so a piece has the bits that each row would compute alone. Pieces are joined from the first key
on. So only the group that begins there may join several; it begins as a row does, with the head's sink. Every other group reads one piece.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.attention.common import LOWEST, begin, load_lines
from octavo.kernels.triton.attention.paged_attention import AT_BEGIN, AT_COUNT, AT_END, AT_LEVEL, AT_ROWS, WORDS
from octavo.kernels.triton.attention.tiles import multiprocessors, team_tiles
from octavo.kernels.triton.invariant.pieces import put_state, read_pieces
from octavo.kernels.triton.invariant.tiles import team_reading
from octavo.kernels.triton.pdl import begin as begin_pdl
from octavo.kernels.triton.pdl import use_pdl, wait
from octavo.step.team_words import Teams, most_levels, most_teams


@triton.jit(do_not_specialize=["most_levels", "table_width", "region_size"])
def invariant_teams(
    q,
    k_cache,
    v_cache,
    tables,
    query_start,
    context_len,
    sinks,
    slopes,
    teams,
    levels,
    levels_state,
    most_levels,
    scale,
    unit,
    cap,
    table_width,
    region_size,
    Q_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TEAM_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TOGETHER: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """levels [R, most_levels, HEADS, DIM], levels_state [R, most_levels, HEADS, 2]. TEAM_TILE: at least GROUP times the rows of a group"""
    begin_pdl(PDL)
    wait(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    for item in range(tl.program_id(0), tl.load(teams) * KV_HEADS, tl.num_programs(0)):
        kv_head, at = item % KV_HEADS, teams + (1 + item // KV_HEADS) * WORDS
        low, high, level = tl.load(at + AT_BEGIN), tl.load(at + AT_END), tl.load(at + AT_LEVEL)
        line = tl.arange(0, TEAM_TILE)
        present = line < tl.load(at + AT_COUNT) * GROUP
        entry = tl.load(at + AT_ROWS + line // GROUP, mask=present, other=0)
        token = tl.load(query_start + entry, mask=present, other=0)
        head = kv_head * GROUP + line % GROUP
        queries = load_lines(q, token.to(tl.int64) * Q_STRIDE + head * DIM, present, DIM, DIM_TILE, True)
        query_position = tl.load(context_len + entry, mask=present, other=0).to(tl.int32) - 1
        table = tables + tl.load(at + AT_ROWS).to(tl.int64) * table_width  # of the first row: the others have the same keys there
        slope = tl.load(slopes + head, mask=present, other=0.0) if SLOPED else 0.0
        largest, total, mixed = begin(sinks, head, present, unit, TEAM_TILE, DIM_TILE, WITH_SINKS)
        if WITH_SINKS:  # a piece joined to an empty state keeps its bits
            largest, total = tl.where(level == 0, largest, LOWEST), tl.where(level == 0, total, 0.0)
        largest, total, mixed = read_pieces(
            queries, query_position, k_cache, v_cache, table, kv_head, low, high, 0, slope, largest, total, mixed,
            scale, unit, cap, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, False, CAPPED, SLOPED, False, PIECE, TILE, STAGES,
        )  # fmt: skip
        place = (entry.to(tl.int64) * most_levels + level) * HEADS + head
        put_state(levels, levels_state, place, present, largest, total, mixed, DIM, DIM_TILE)


def read_shared_pieces(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    teams: Teams,
    numbers: tuple[Any, ...],  # scale, unit, cap, width of a table, size of a region
    shared: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Returns the levels of rows in shared-prefix groups: [R, most_levels, heads, dim] and [R, most_levels, heads, 2]"""
    rows = len(context_len)
    assert len(teams.lines) > most_teams(rows)
    levels = torch.empty(rows, most_levels(rows), *q.shape[1:], dtype=torch.float32, device=q.device)
    states = torch.empty(*levels.shape[:3], 2, dtype=torch.float32, device=q.device)
    tiles, pdl = team_tiles(q.dtype, q.shape[2]), use_pdl()
    how = team_reading(q.dtype, tiles.queries)
    invariant_teams[(tiles.programs * multiprocessors(q.device),)](
        q, k_cache, v_cache, tables, query_start, context_len, sinks, slopes, teams.lines, levels, states, levels.shape[1], *numbers,
        **{name: value for name, value in shared.items() if name != "WINDOWED"}, TEAM_TILE=how.queries, STAGES=how.stages, PDL=pdl,
        num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
    return levels, states
