"""Attention over a KV cache: rows of one query use the decode kernel, rows of more the prefill kernel.

    paged         cache [num_blocks, block_size, kv_heads, head_dim] in any layout, tables [R, B]: the blocks of each row
    contiguous    cache [num_rows, max_len, kv_heads, head_dim], tables [R, 1]: the region of each row

Both process the same tiles in the same order, so with equal bytes in the caches the results are equal bit for bit. Nothing here
waits for the GPU: `max_query` is a bound the caller knows, and rows are classified on the device. A row's context ends with its
queries; slots after it are never read. A row without context yields zeros, and its log-sum-exp is -inf, or its sink's score.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.cache_layout import tokens_together
from octavo.kernels.triton.attention.common import LOG2_E, begin, load_lines
from octavo.kernels.triton.attention.decode import LEVELS, decode, put, read_keys
from octavo.kernels.triton.attention.decode_shares import decode_shares
from octavo.kernels.triton.attention.prefill import prefill
from octavo.kernels.triton.attention.prefill_hopper import prefill_divided
from octavo.kernels.triton.attention.tiles import MIN_DOT, Tiles, decode_tiles, multiprocessors, prefill_tiles, team_tiles
from octavo.kernels.triton.pdl import begin as begin_pdl
from octavo.kernels.triton.pdl import use_pdl, wait
from octavo.kernels.triton.target import capability, has_copy_engine
from octavo.step import team_words
from octavo.step.share_words import DecodeShares, most_parts, most_shares
from octavo.step.team_words import MOST_LEVELS, MOST_ROWS, Teams, most_teams

Pair = tuple[Tensor, Tensor]
Given = tuple[Any, ...]  # arguments that both kernels start with

AT_BEGIN, AT_END, AT_LEVEL, AT_COUNT, AT_ROWS, WORDS = map(
    tl.constexpr, (team_words.BEGIN, team_words.END, team_words.LEVEL, team_words.COUNT, team_words.ROWS, team_words.LINE)
)


def paged_attention(
    q: Tensor,  # [T, heads, head_dim]; tokens may be strided, as q is inside qkv
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,  # int32 or int64
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    scale: float,
    out: Tensor,  # [T, heads, head_dim]
    max_query: int,
    window: int | None = None,
    lse: Tensor | None = None,  # [T, heads] float32, natural log
    paged: bool = True,
    tiles: Tiles | None = None,  # of the kernel selected by max_query
    of_teams: Tiles | None = None,
    shares: DecodeShares | None = None,  # from `shares_of` for the same rows: layers with the same window use the same
    fresh: Pair | None = None,  # k and v of q's tokens, as write_kv leaves them in qkv [T, kv_heads, head_dim]: read instead of the cache
    soft_cap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
    slopes: Tensor | None = None,  # [heads] float32: ALiBi
) -> Tensor:
    heads, head_dim = q.shape[1:]
    size, kv_heads = k_cache.shape[1:3]
    _check(q, k_cache, v_cache, tables, out, paged, scale)
    if not len(q):
        return out
    capped, sloped = soft_cap is not None, slopes is not None
    shared = {
        "Q_STRIDE": q.stride(0), "HEADS": heads, "KV_HEADS": kv_heads, "DIM": head_dim, "DIM_TILE": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": size if paged else 1, "PAGED": paged, "TOGETHER": tokens_together(k_cache), "CAPPED": capped, "SLOPED": sloped,
        "WITH_SINKS": sinks is not None, "WITH_LSE": lse is not None,
    }  # fmt: skip
    tensors = q, k_cache, v_cache, tables, query_start, context_len, out, lse, sinks, slopes
    numbers = scale, LOG2_E * (1.0 if capped or sloped else scale), soft_cap or 0.0, tables.stride(0), size, window or 0
    if max_query > 1:
        plain = window is None and sinks is None and not capped and not sloped
        tiles = tiles or prefill_tiles(q.dtype, head_dim, capability(), plain)
        if tiles.divided:
            prefill_divided(*tensors[:8], fresh, numbers, shared, tiles)
        else:
            _prefill(tensors, numbers, shared, fresh, tiles)
        tiles = None
    chosen = tiles or decode_tiles(q.dtype, head_dim)
    if shares is None:
        shares = shares_of(query_start, context_len, k_cache, window, chosen)
    levels = _teams(tensors, numbers, shared, shares.teams, of_teams or team_tiles(q.dtype, head_dim)) if shares.teams else (None, None)
    _decode(tensors, numbers, shared, shares.lines, levels, chosen)
    return out


def shares_of(
    query_start: Tensor,
    context_len: Tensor,
    k_cache: Tensor,
    window: int | None,
    tiles: Tiles | None = None,
    teams: Teams | None = None,  # not with a window: there rows read alone
) -> DecodeShares:
    """Divides the decode work of this step into work items (`step/share_words.py`)."""
    assert teams is None or window is None
    chosen = tiles or decode_tiles(k_cache.dtype, k_cache.shape[3])
    programs = chosen.programs * multiprocessors(k_cache.device)
    cut = chosen.keys, programs, chosen.shares, chosen.grain
    return decode_shares(query_start, context_len, window, k_cache.shape[2], *cut, teams)


def team_sizes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Returns how many rows a shared-prefix group may have, and how many groups fill the GPU."""
    tiles = team_tiles(dtype, head_dim)
    return min(tiles.queries // (heads // kv_heads), MOST_ROWS), -(-tiles.programs * multiprocessors(device) // kv_heads)


# -- prefill


def _prefill(tensors: Given, numbers: Given, shared: dict[str, Any], fresh: Pair | None, tiles: Tiles) -> None:
    q, context_len = tensors[0], tensors[5]
    heads, kv_heads = shared["HEADS"], shared["KV_HEADS"]
    lines = max(tiles.queries, triton.next_power_of_2(heads // kv_heads))
    described = tiles.described and fresh is not None and _describable(q)
    new: tuple[Any, Any] = fresh or (None, None)
    descriptors = [_describe(one, tiles.keys) if described else None for one in new]
    prefill[(len(q) // (lines * kv_heads // heads) + len(context_len), kv_heads)](
        *tensors, *new, *descriptors, *numbers, len(context_len), **shared, LINES=lines, NEW_STRIDE=new[0].stride(0) if fresh else 0,
        WINDOWED=numbers[-1] > 0, WITH_NEW=fresh is not None, DESCRIBED=described, TILE=tiles.keys, STAGES=tiles.stages,
        LAGGING=tiles.lagging, num_warps=tiles.warps,
    )  # fmt: skip


def _describable(q: Tensor) -> bool:
    """Whether tensor descriptors can be used: they copy whole tiles of powers of two, on Hopper and later."""
    return q.dtype.itemsize == 2 and q.shape[2] == triton.next_power_of_2(q.shape[2]) and has_copy_engine(capability())


def _describe(new: Tensor, keys: int) -> TensorDescriptor:
    """A descriptor for tiles of one head and this many tokens of [T, kv_heads, head_dim]."""
    return TensorDescriptor(new, [len(new), new.shape[1] * new.shape[2]], [new.stride(0), 1], [keys, new.shape[2]])


# -- the shared keys of cascade (shared-prefix) groups, before each row reads its other keys (`decode.py`); see `step/team_words.py`
#
# A program processes pairs of a group and a KV head: the queries of all rows of the group use each tile of keys, which is loaded
# once. The results of a row are stored as its levels, which the decode kernel merges. The number of programs does not depend on the
# work, since most steps that launch this kernel have no groups.


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


def _teams(tensors: Given, numbers: Given, shared: dict[str, Any], teams: Teams, tiles: Tiles) -> Pair:
    """Returns the levels of rows in shared-prefix groups."""
    q, k_cache, v_cache, tables, query_start, context_len, *_, slopes = tensors
    assert len(teams.lines) > most_teams(len(context_len))
    levels = torch.empty(len(context_len), MOST_LEVELS, *q.shape[1:], dtype=torch.float32, device=q.device)
    sums = torch.empty(levels.shape[:3], dtype=torch.float32, device=q.device)
    pdl = tiles.pdl and use_pdl()
    unlike = "WITH_SINKS", "WITH_LSE"  # these apply to rows
    read_in_teams[(tiles.programs * multiprocessors(q.device),)](
        q, k_cache, v_cache, tables, query_start, context_len, slopes, teams.lines, levels, sums, *numbers[:-1],
        **{name: value for name, value in shared.items() if name not in unlike}, TEAM_TILE=tiles.queries, TILE=tiles.keys,
        STAGES=tiles.stages, PDL=pdl, num_warps=tiles.warps, launch_pdl=pdl,
    )  # fmt: skip
    return levels, sums


# -- decode


def _decode(
    tensors: Given, numbers: Given, shared: dict[str, Any], shares: Tensor, levels: tuple[Tensor | None, Tensor | None], tiles: Tiles
) -> None:
    q, k_cache, v_cache, tables, _query_start, context_len, out, lse, sinks, slopes = tensors
    scale, unit, cap, width, size, _window = numbers
    kv_heads, head_dim = shared["KV_HEADS"], shared["DIM"]
    group, programs = shared["HEADS"] // kv_heads, tiles.programs * multiprocessors(q.device)
    most = most_shares(len(context_len), kv_heads, programs, tiles.shares)
    assert len(shares) == most + 1, f"{len(shares)} lines for {programs} programs, {len(context_len)} rows"
    left = torch.empty(most_parts(programs, tiles.shares), group, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(left.shape[:2], dtype=torch.float32, device=q.device)
    pdl = tiles.pdl and use_pdl()
    members = triton.next_power_of_2(group)
    decode[(most,)](
        q, k_cache, v_cache, tables, shares, out, lse, sinks, slopes, left, sums, *levels, scale, unit, cap, width, size, **shared,
        WITH_LEVELS=levels[0] is not None, GROUP_TILE=max(members, MIN_DOT), MERGE_TILE=members, TILE=tiles.keys, STAGES=tiles.stages,
        PDL=pdl, num_warps=tiles.warps, launch_pdl=pdl,
    )  # fmt: skip


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, out: Tensor, paged: bool, scale: float) -> None:
    size, kv_heads, head_dim = k_cache.shape[1:]
    assert head_dim % 16 == 0 and head_dim <= 256, f"head_dim {head_dim}"
    assert not paged or (size == triton.next_power_of_2(size) and size <= 256), f"block size {size}"
    assert q.shape[1] % kv_heads == 0, f"{q.shape[1]} heads over {kv_heads} KV heads"
    assert q.stride()[1:] == (head_dim, 1) and tables.stride(1) == 1 and out.is_contiguous() and scale > 0
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride() and (paged or k_cache.is_contiguous())
