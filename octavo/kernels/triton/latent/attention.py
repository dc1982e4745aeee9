"""Attention over latents: a tile of the cache is loaded once, and is both the keys and the values of all heads of a program.

    a line of queries    one head of one token:  [ latent: RANK | rotated: ROTARY ]
    a tile of keys       [ latent: RANK | rotated: ROTARY ] of TILE tokens     scores = both products; values are the latents
    a program            LINES lines: some heads of one token in a decode step, some tokens with all heads in a prompt

    decode     rows of one query: split-KV work items, as in `attention/decode.py`, of which each takes a group of heads
    prefill    rows of more: tiles of queries, as in `attention/prefill.py`. New keys are read from the cache, like all others

The numbers of a latent and of a rotary key are padded to powers of two in registers, and are not in memory.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.attention.common import HIDDEN, LOWEST, finish, load_lines, mix, slots_of, weigh
from octavo.kernels.triton.attention.decode import FAN, put
from octavo.kernels.triton.attention.decode_shares import AT_ALL, AT_ARRIVED, WORDS, load_share
from octavo.kernels.triton.attention.prefill import row_of_tile
from octavo.kernels.triton.pdl import begin as begin_pdl
from octavo.kernels.triton.pdl import wait


@triton.jit
def load_both(
    source, place, inside, RANK: tl.constexpr, ROTARY: tl.constexpr, RANK_TILE: tl.constexpr, ROTARY_TILE: tl.constexpr
):  # fmt: skip
    """(latents [N, RANK_TILE], rotated numbers [N, ROTARY_TILE]) at addresses [N]; zeros outside"""
    latents = load_lines(source, place, inside, RANK, RANK_TILE, True)
    return latents, load_lines(source + RANK, place, inside, ROTARY, ROTARY_TILE, True)


@triton.jit
def read_latents(
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
    """(largest score, sum of weights, weighted latents) of queries [N] over the keys from low to high that each of them sees"""
    LINES: tl.constexpr = latent_q.shape[0]
    largest = tl.full([LINES], LOWEST, tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, RANK_TILE], tl.float32)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        inside = position < high
        place = slots_of(table, position, inside, region_size, BLOCK_SIZE, PAGED) * (RANK + ROTARY)
        latents, rotary = load_both(cache, place, inside, RANK, ROTARY, RANK_TILE, ROTARY_TILE)
        scores = tl.dot(latent_q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rotary_q, tl.trans(rotary), scores, input_precision="ieee")
        visible = inside[None, :] & (position[None, :] <= query_position[:, None])
        largest, total, weights, fade = weigh(tl.where(visible, scores, HIDDEN), largest, total, unit)
        mixed = mix(weights, fade, latents, mixed)
    return largest, total, mixed


@triton.jit(do_not_specialize=["table_width", "region_size"])
def latent_decode(
    q,
    cache,
    tables,
    shares,
    out,
    left,
    left_lse,
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
    MERGED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """left [most_parts, GROUP, RANK], left_lse [most_parts, GROUP], both float32: results of parts of split rows"""
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
    largest, total, mixed = read_latents(
        latent_q, rotary_q, tl.full([LINES], 0, tl.int32) + (end - 1), cache, tables + row.to(tl.int64) * table_width, low, high,
        region_size, unit, RANK, ROTARY, RANK_TILE, ROTARY_TILE, BLOCK_SIZE, PAGED, TILE, STAGES,
    )  # fmt: skip
    result, log_sum = finish(largest, total, mixed, unit)
    if parts == 1:
        put(out, line, present, result, RANK, RANK_TILE)
    else:
        put(left, share.to(tl.int64) * GROUP + member, present, result, RANK, RANK_TILE)
        tl.store(left_lse + share * GROUP + member, log_sum, mask=present)
        merge(
            left, left_lse, shares, out, share, part, parts, token.to(tl.int64) * HEADS + group * GROUP,
            GROUP, GROUPS, RANK, RANK_TILE, MERGED,
        )  # fmt: skip


@triton.jit
def merge(
    left,
    left_lse,
    shares,
    out,
    share,
    part,
    parts,
    line,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Like `merge` of `attention/decode.py`, for MERGED heads at a time: all of them would not fit in registers. line: of the first head"""
    part_0 = share - part * GROUPS
    stride, turn = 1, 0
    while stride < parts:
        span = stride * FAN
        part = part // span * span
        count = tl.minimum(tl.cdiv(parts - part, stride), FAN)
        first = part_0 + part * GROUPS
        last = count == 1
        if count > 1:
            tl.debug_barrier()  # all threads must have stored their results before one signals
            arrived = shares + (1 + first + turn * GROUPS) * WORDS + AT_ARRIVED
            last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1
            if last:
                tl.store(arrived, 0)
                for member in range(0, GROUP, MERGED):
                    head = member + tl.arange(0, MERGED)
                    at = first.to(tl.int64) * GROUP + head
                    result, log_sum = merged(left, left_lse, at, count, stride * GROUPS * GROUP, head < GROUP, RANK, RANK_TILE, MERGED)
                    if span >= parts:
                        put(out, line + head, head < GROUP, result, RANK, RANK_TILE)
                    else:
                        tl.debug_barrier()  # all threads must have read what is now overwritten
                        put(left, at, head < GROUP, result, RANK, RANK_TILE)
                        tl.store(left_lse + at, log_sum, mask=head < GROUP)
        stride = tl.where(last, span, parts)
        turn += 1


@triton.jit
def merged(
    left, left_lse, line, count, apart, present, RANK: tl.constexpr, RANK_TILE: tl.constexpr, MERGED: tl.constexpr
):  # fmt: skip
    """(output, log-sum-exp in units of log2) of `count` parts. Other programs stored them, so loads bypass the L1 cache."""
    dim = tl.arange(0, RANK_TILE)
    largest = tl.full([MERGED], LOWEST, tl.float32)
    total = tl.zeros([MERGED], tl.float32)
    mixed = tl.zeros([MERGED, RANK_TILE], tl.float32)
    for one in tl.static_range(FAN):
        log_sum = tl.load(left_lse + line + one * apart, mask=present & (one < count), other=LOWEST, cache_modifier=".cg")
        largest = tl.maximum(largest, log_sum)
    for one in tl.static_range(FAN):
        there = present & (one < count)
        log_sum = tl.load(left_lse + line + one * apart, mask=there, other=float("-inf"), cache_modifier=".cg")
        pointers = left + (line + one * apart)[:, None] * RANK + dim[None, :]
        numbers = tl.load(pointers, mask=there[:, None] & (dim < RANK)[None, :], other=0.0, cache_modifier=".cg")
        weight = tl.exp2(log_sum - largest)
        total += weight
        mixed += weight[:, None] * numbers
    return finish(largest, total, mixed, 1.0)


@triton.jit(do_not_specialize=["num_rows", "table_width", "region_size"])
def latent_prefill(
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
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of a row's queries with a group of heads. Tiles with the most keys first."""
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
    largest, total, mixed = read_latents(
        latent_q, rotary_q, past + query, cache, tables + row.to(tl.int64) * table_width, 0, past + tl.minimum(offset + TOKENS, count),
        region_size, unit, RANK, ROTARY, RANK_TILE, ROTARY_TILE, BLOCK_SIZE, PAGED, TILE, STAGES,
    )  # fmt: skip
    result, _log_sum = finish(largest, total, mixed, unit)
    put(out, line, present, result, RANK, RANK_TILE)
