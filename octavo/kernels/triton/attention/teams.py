"""Reads shared keys for cascade (shared-prefix) groups, before each row reads its other keys (`decode.py`); see `step/team_words.py`.

A program processes pairs of a group and a KV head: the queries of all rows of the group use each tile of keys, which is loaded once.
The results of a row are stored as its levels, which the decode kernel merges. The number of programs does not depend on the work,
since most steps that launch this kernel have no groups.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention.common import begin, load_lines
from octavo.kernels.triton.attention.decode import LEVELS, put, read_keys
from octavo.kernels.triton.pdl import begin as begin_pdl
from octavo.kernels.triton.pdl import wait
from octavo.step import team_words

AT_BEGIN, AT_END, AT_LEVEL, AT_COUNT, AT_ROWS, WORDS = map(
    tl.constexpr, (team_words.BEGIN, team_words.END, team_words.LEVEL, team_words.COUNT, team_words.ROWS, team_words.LINE)
)


@triton.jit(do_not_specialize=["table_width", "region_size"])
def read_in_teams(
    q,
    k_cache,
    v_cache,
    tables,
    query_start,
    context_len,
    slopes,
    teams,
    levels,
    levels_lse,
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
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """levels [R, LEVELS, HEADS, DIM] and levels_lse [R, LEVELS, HEADS], float32. TEAM_TILE: at least GROUP times the rows of a group"""
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
        table = tables + tl.load(at + AT_ROWS).to(tl.int64) * table_width  # of the first row: the others have the same keys there
        slope, end = 0.0, high
        if SLOPED:  # the distance of a key depends on the row
            slope = tl.load(slopes + head, mask=present, other=0.0)
            end = tl.load(context_len + entry, mask=present, other=0).to(tl.int32)[:, None]
        largest, total, mixed = begin(q, head, present, unit, TEAM_TILE, DIM_TILE, False)
        result, log_sum = read_keys(
            queries, k_cache, v_cache, table, kv_head, low, high, end, slope, largest, total, mixed, scale, unit, cap, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, CAPPED, SLOPED, TILE, STAGES,
        )  # fmt: skip
        place = (entry.to(tl.int64) * LEVELS + level) * HEADS + head
        put(levels, place, present, result, DIM, DIM_TILE)
        tl.store(levels_lse + place, log_sum, mask=present)
