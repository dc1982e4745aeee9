"""The arithmetic that all attention kernels of `--deterministic` share: the keys of a piece, and the pieces of a row in their order."""

import triton
import triton.language as tl

from octavo.kernels.triton.attention.common import HIDDEN, LOWEST, begin, load_lines, places_of, score
from octavo.kernels.triton.attention.decode import put

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
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(largest score, sum of weights, weighted values) over the keys of a piece that each query [N] sees. Not MASKED: all, of a whole piece

    A mask that hides nothing changes no bit.
    """
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
        keys = load_lines(k_cache, of_keys, inside, DIM, DIM_TILE, MASKED)
        behind = position[None, :] - query_position[:, None]
        scores = score(queries, keys, scale, cap, slope, behind, CAPPED, SLOPED)
        if MASKED:
            visible = behind <= 0
            if WINDOWED:
                visible &= behind > -window
            scores = tl.where(visible, scores, HIDDEN)
        values = load_lines(v_cache, of_keys, inside, DIM, DIM_TILE, MASKED)
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
    SPLIT: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Joins the pieces from `low`, where one begins, to `high`. SPLIT: pieces that every query sees whole are read without masks."""
    masked = low
    if SPLIT and not WINDOWED:
        seen = tl.minimum(tl.min(query_position) + 1, high)
        masked = tl.maximum(low, seen // PIECE * PIECE)
        for piece in range(low, masked, PIECE):
            piece_largest, piece_total, piece_mixed = read_piece(
                queries, query_position, k_cache, v_cache, table, kv_head, piece, piece + PIECE, window, slope, scale, unit, cap,
                region_size, KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, False, TILE, STAGES,
            )  # fmt: skip
            largest, total, mixed = join(largest, total, mixed, piece_largest, piece_total, piece_mixed, unit)
    for piece in range(masked, high, PIECE):
        piece_largest, piece_total, piece_mixed = read_piece(
            queries, query_position, k_cache, v_cache, table, kv_head, piece, tl.minimum(piece + PIECE, high), window, slope,
            scale, unit, cap, region_size,
            KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, PAGED, TOGETHER, WINDOWED, CAPPED, SLOPED, True, TILE, STAGES,
        )  # fmt: skip
        largest, total, mixed = join(largest, total, mixed, piece_largest, piece_total, piece_mixed, unit)
    return largest, total, mixed


@triton.jit
def answer(total, mixed, out, line, present, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Stores zeros for a query that sees no key."""
    put(out, line, present, mixed / tl.where(total > 0, total, 1.0)[:, None], DIM, DIM_TILE)


# -- states of pieces in memory: `mixed` [lines, DIM] and `states` [lines, 2] (largest score, sum of weights), both float32


@triton.jit
def put_state(mixed_lines, states, line, present, largest, total, mixed, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    put(mixed_lines, line, present, mixed, DIM, DIM_TILE)
    tl.store(states + 2 * line, largest, mask=present)
    tl.store(states + 2 * line + 1, total, mask=present)


@triton.jit
def load_state(mixed_lines, states, line, present, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """(largest, total, mixed). Other programs may just have stored them, so loads bypass the L1 cache."""
    dim = tl.arange(0, DIM_TILE)
    largest = tl.load(states + 2 * line, mask=present, other=LOWEST, cache_modifier=".cg")
    total = tl.load(states + 2 * line + 1, mask=present, other=0.0, cache_modifier=".cg")
    pointers, inside = mixed_lines + line[:, None] * DIM + dim[None, :], present[:, None] & (dim < DIM)[None, :]
    return largest, total, tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def begin_row(
    levels,
    levels_state,
    most_levels,
    sinks,
    row,
    head,
    present,
    unit,
    depth,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    WITH_LEVELS: tl.constexpr,
):
    """The state before a row's own pieces: empty, or that of its shared pieces. Level 0 includes the head's sink (`teams.py`)."""
    largest, total, mixed = begin(sinks, head, present, unit, head.shape[0], DIM_TILE, WITH_SINKS)
    if WITH_LEVELS:  # noqa: SIM102 (a compile-time constant, unlike the depth)
        if depth > 0:
            line = row.to(tl.int64) * most_levels * HEADS + head
            largest, total, mixed = load_state(levels, levels_state, line, present, DIM, DIM_TILE)
            for level in range(1, depth):
                more = load_state(levels, levels_state, line + level * HEADS, present, DIM, DIM_TILE)
                largest, total, mixed = join(largest, total, mixed, more[0], more[1], more[2], unit)
    return largest, total, mixed
