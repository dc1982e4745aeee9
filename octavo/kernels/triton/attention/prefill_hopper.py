"""Prefill attention for Hopper, in Gluon: one group of warps loads keys and values, two compute, and none waits for memory.

    warps 8-11   | keys of 0 | values of 0 | keys of 1 | values of 1 | ...          producer: into STAGES buffers of shared memory
    warps 0-3    | scores 0 | weights 0 | scores 1, values 0 | weights 1 | ...      consumer: lines 0 to 63
    warps 4-7    | the same ...                                                     consumer: lines 64 to 127

Work is divided as in `prefill.py`, which this replaces if there are no windows, caps, slopes or sinks: a program takes
a tile of a row's queries and one KV head. Consumers read tiles of keys in order, independently of their source, so paged,
contiguous and new tokens' own keys and values give the same bits. The copy engine loads tiles that are contiguous and lie completely
within their row; all others are loaded line by line, with zeros after the end. A tile's values are mixed one step late, while the
tensor cores compute the next tile's scores.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels.triton.attention import common
from octavo.kernels.triton.attention.tiles import Tiles

LN2 = gl.constexpr(common.LN_2)
HIDDEN, LOWEST = gl.constexpr(common.HIDDEN.value), gl.constexpr(common.LOWEST.value)
LINES = 128
HALF = gl.constexpr(LINES // 2)  # lines of a consumer
REGISTERS = {"PRODUCER_REGISTERS": 40, "CONSUMER_REGISTERS": 232}  # per thread: 168 each at launch
AT_ONCE = gl.constexpr(256)  # rows examined at once to find that of a tile
PIECE = gl.constexpr(32)  # keys whose lines are loaded at once


@gluon.jit
def row_of_tile(query_start, tile, num_rows, TOKENS: gl.constexpr):
    """The last row whose tiles start at or before this one."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    found = 0
    for start in range(0, num_rows, AT_ONCE):
        row = start + gl.arange(0, AT_ONCE, layout=layout)
        token = gl.load(query_start + row, mask=row < num_rows, other=0).to(gl.int32)
        found += gl.sum(((token // TOKENS + row <= tile) & (row < num_rows)).to(gl.int32), 0)
    return found - 1


@gluon.jit
def copy_lines(source, table, kv_head, start, end, shift, region_size, place, STRIDE: gl.constexpr, KV_HEADS: gl.constexpr,
               DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGED: gl.constexpr, TOGETHER: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """Loads keys or values from `start` on, zeros from `end` on. STRIDE 0: from the cache, through the table; else from [T, STRIDE]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    HEAD: gl.constexpr = DIM if STRIDE > 0 else DIM * TOGETHER
    for piece in gl.static_range(TILE // PIECE):
        position = start + piece * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
        inside = position < end
        if STRIDE > 0:
            line = (shift + position).to(gl.int64) * STRIDE
        else:
            if PAGED:
                block = gl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(gl.int64)
                slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            else:
                slot = gl.load(table).to(gl.int64) * region_size + position
            among = slot & (TOGETHER - 1)
            line = ((slot - among) * KV_HEADS + among) * DIM  # relative to the head's first line, as in `place_of` of common.py
        pointers = source + kv_head * HEAD + line[:, None] + dim[None, :]
        async_copy.async_copy_global_to_shared(place.slice(piece * PIECE, PIECE), pointers, mask=inside[:, None])
    async_copy.commit_group()


@gluon.jit
def copy_both(k_source, v_source, table, kv_head, start, end, shift, region_size, k_place, v_place, k_ready, v_ready, v_free, phase,
              STRIDE: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGED: gl.constexpr,
              TOGETHER: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """Loads a tile of keys and values line by line; the tensor cores may read them after a fence."""
    copy_lines(k_source, table, kv_head, start, end, shift, region_size, k_place, STRIDE, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER, TILE)
    mbarrier.wait(v_free, phase)
    copy_lines(v_source, table, kv_head, start, end, shift, region_size, v_place, STRIDE, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER, TILE)
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(k_ready)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(v_ready)


@gluon.jit
def produce(k_cache, v_cache, k_new, v_new, k_tiles, v_tiles, table, kv_head, past, end, shift, region_size, steps, k_places, v_places,
            ready, free, NEW_STRIDE: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
            PAGED: gl.constexpr, TOGETHER: gl.constexpr, DESCRIBED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    behind = (past + TILE - 1) // TILE  # tiles of the past
    for step in range(steps):
        stage = step % STAGES
        phase = step // STAGES % 2 ^ 1
        k_place, v_place = k_places.index(stage), v_places.index(stage)
        k_ready, v_ready = ready.index(2 * stage), ready.index(2 * stage + 1)
        k_free, v_free = free.index(2 * stage), free.index(2 * stage + 1)
        mbarrier.wait(k_free, phase)
        if step < behind:
            copy_both(k_cache, v_cache, table, kv_head, step * TILE, past, 0, region_size, k_place, v_place, k_ready, v_ready, v_free,
                      phase, 0, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER, TILE)  # fmt: skip
        else:
            start = past + (step - behind) * TILE
            whole = DESCRIBED & (start + TILE <= end)
            if whole:
                if DESCRIBED:
                    mbarrier.expect(k_ready, TILE * DIM * 2)
                    tma.async_copy_global_to_shared(k_tiles, [shift + start, kv_head * DIM], k_ready, k_place)
                    mbarrier.wait(v_free, phase)
                    mbarrier.expect(v_ready, TILE * DIM * 2)
                    tma.async_copy_global_to_shared(v_tiles, [shift + start, kv_head * DIM], v_ready, v_place)
            else:
                copy_both(k_new, v_new, table, kv_head, start, end, shift, region_size, k_place, v_place, k_ready, v_ready, v_free,
                          phase, NEW_STRIDE, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER, TILE)  # fmt: skip


@gluon.jit
def weigh(scores, largest, total, unit):
    now = gl.maximum(largest, gl.max(scores, 1))
    weights = gl.exp2(scores * unit - (now * unit)[:, None])
    fade = gl.exp2((largest - now) * unit)
    return now, total * fade + gl.sum(weights, 1), weights, fade


@gluon.jit
def done(total):
    """Returns the same value, and keeps the assembler from moving instructions across: as far as it knows, this may exit."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p exit; mov.b32 $0, $1; }", "=f,f", [total], gl.float32, False, 1
    )


@gluon.jit
def over_tiles(low, high, start, limit, unit, largest, total, mixed, weights, q_place, k_places, v_places, ready, free,
               MASKED: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Processes tiles `low` to `high`; `low` starts at position `start`; queries see keys up to `limit`. Without branches, which would
    wait for products in flight."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    o_lines: gl.constexpr = gl.SliceLayout(1, o_layout)
    nothing = gl.full([HALF, TILE], 0.0, gl.float32, layout=s_layout)
    key = gl.arange(0, TILE, layout=gl.SliceLayout(0, s_layout))
    for step in range(low, high):
        k_stage, v_stage = step % STAGES, (step - 1) % STAGES
        mbarrier.wait(ready.index(2 * k_stage), step // STAGES % 2)
        scores = warpgroup_mma(q_place, k_places.index(k_stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(2 * v_stage + 1), (step - 1) // STAGES % 2)
        mixed = warpgroup_mma(weights, v_places.index(v_stage), mixed, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        gl.thread_barrier()
        mbarrier.arrive(free.index(2 * k_stage))
        if MASKED:
            scores = gl.where((start + (step - low) * TILE + key)[None, :] <= limit[:, None], scores, HIDDEN)
        largest, total, weighed, fade = weigh(scores, largest, total, unit)
        total = done(total)
        mixed, weights, weighed, total = warpgroup_mma_wait(0, deps=[mixed, weights, weighed, total])
        gl.thread_barrier()
        mbarrier.arrive(free.index(2 * v_stage + 1))
        mixed = mixed * gl.convert_layout(fade, o_lines)[:, None]
        weights = gl.convert_layout(weighed.to(weights.dtype), weights.type.layout)
    return largest, total, mixed, weights


@gluon.jit
def consume(q, out, lse, kv_head, token, count, offset, past, steps, unit, q_places, k_places, v_places, ready, free,
            Q_STRIDE: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, WITH_LSE: gl.constexpr,
            TOKENS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Lines WHICH * 64 to WHICH * 64 + 63 of the tile of queries."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    s_lines: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_lines: gl.constexpr = gl.SliceLayout(1, o_layout)
    w_lines: gl.constexpr = gl.SliceLayout(1, wide)
    dtype: gl.constexpr = q.dtype.element_ty

    line = WHICH * HALF + gl.arange(0, HALF, layout=w_lines)
    query, head = offset + line // GROUP, kv_head * GROUP + line % GROUP
    present = (query < count) & (line < TOKENS * GROUP)
    at = token.to(gl.int64) + query
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
    queries = gl.load(q + (at * Q_STRIDE + head * DIM)[:, None] + dim[None, :], mask=present[:, None], other=0.0)
    q_place = q_places.index(WHICH)
    q_place.store(queries)
    fence_async_shared()
    gl.thread_barrier()

    earliest = past + offset
    query_position = earliest + (WHICH * HALF + gl.arange(0, HALF, layout=s_lines)) // GROUP
    largest = gl.full([HALF], LOWEST, gl.float32, layout=s_lines)
    total = gl.full([HALF], 0.0, gl.float32, layout=s_lines)
    mixed = gl.full([HALF, DIM], 0.0, gl.float32, layout=o_layout)

    behind = (past + TILE - 1) // TILE
    mbarrier.wait(ready.index(0), 0)
    nothing = gl.full([HALF, TILE], 0.0, gl.float32, layout=s_layout)
    scores = warpgroup_mma(q_place, k_places.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    gl.thread_barrier()
    mbarrier.arrive(free.index(0))
    limit = gl.where(behind > 0, past - 1, query_position)
    scores = gl.where(gl.arange(0, TILE, layout=gl.SliceLayout(0, s_layout))[None, :] <= limit[:, None], scores, HIDDEN)
    largest, total, weighed, _ = weigh(scores, largest, total, unit)
    weights = gl.convert_layout(weighed.to(dtype), p_layout)

    low = 1
    for part in range(2):  # the past, then this step's tokens: whole tiles visible to all queries, then those that need a mask
        begun = part * behind
        whole = gl.maximum(begun + gl.where(part == 0, past, offset + 1) // TILE, low)
        high = gl.where(part == 0, gl.maximum(behind, whole), steps)
        start = part * past + (whole - begun) * TILE
        limit = gl.where(part == 0, past - 1, query_position)
        largest, total, mixed, weights = over_tiles(
            low, whole, 0, limit, unit, largest, total, mixed, weights, q_place, k_places, v_places, ready, free, False, DIM, TILE, STAGES,
        )  # fmt: skip
        largest, total, mixed, weights = over_tiles(
            whole, high, start, limit, unit, largest, total, mixed, weights, q_place, k_places, v_places, ready, free, True, DIM, TILE,
            STAGES,
        )  # fmt: skip
        low = high
    last = (steps - 1) % STAGES
    mbarrier.wait(ready.index(2 * last + 1), (steps - 1) // STAGES % 2)
    mixed = warpgroup_mma(weights, v_places.index(last), mixed, is_async=True)
    mixed = warpgroup_mma_wait(0, deps=[mixed])

    result = mixed * gl.convert_layout(1.0 / total, o_lines)[:, None]
    q_place.store(result.to(dtype))
    gl.thread_barrier()
    place = at * HEADS + head
    gl.store(out + place[:, None] * DIM + dim[None, :], q_place.load(wide), mask=present[:, None])
    if WITH_LSE:
        log_sum = gl.convert_layout(largest * unit + gl.log2(total), w_lines)
        gl.store(lse + place, log_sum * LN2, mask=present)


@gluon.jit(do_not_specialize=["num_rows", "table_width", "region_size"])
def prefill_hopper(
    q,
    k_cache,
    v_cache,
    tables,
    query_start,
    context_len,
    out,
    lse,
    k_new,
    v_new,
    k_tiles,
    v_tiles,
    unit,
    table_width,
    region_size,
    num_rows,
    Q_STRIDE: gl.constexpr,
    NEW_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGED: gl.constexpr,
    TOGETHER: gl.constexpr,
    DESCRIBED: gl.constexpr,
    WITH_LSE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    tile, kv_head = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1)
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TOKENS: gl.constexpr = 2 * HALF // GROUP
    row = row_of_tile(query_start, tile, num_rows, TOKENS)
    token = gl.load(query_start + row).to(gl.int32)
    count = (gl.load(query_start + row + 1) - token).to(gl.int32)
    offset = (tile - (token // TOKENS + row)).to(gl.int32) * TOKENS
    if (count <= 1) | (offset >= count):
        return  # for the decode kernel, or after the row's last tile

    end = gl.load(context_len + row).to(gl.int32)
    past = end - count
    shift = token - past
    table = tables + row.to(gl.int64) * table_width
    steps = (past + TILE - 1) // TILE + (gl.minimum(offset + TOKENS, count) + TILE - 1) // TILE

    dtype: gl.constexpr = q.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, DIM], dtype)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, DIM], dtype)
    q_places = gl.allocate_shared_memory(dtype, [2, HALF, DIM], q_layout)
    k_places = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], layout)
    v_places = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], layout)
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())  # keys of a stage, its values, keys of the next
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(2 * STAGES):
        mbarrier.init(ready.index(one), count=1)
        mbarrier.init(free.index(one), count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (consume, (q, out, lse, kv_head, token, count, offset, past, steps, unit, q_places, k_places, v_places, ready, free,
                       Q_STRIDE, HEADS, KV_HEADS, DIM, WITH_LSE, TOKENS, TILE, STAGES, 0)),
            (consume, (q, out, lse, kv_head, token, count, offset, past, steps, unit, q_places, k_places, v_places, ready, free,
                       Q_STRIDE, HEADS, KV_HEADS, DIM, WITH_LSE, TOKENS, TILE, STAGES, 1)),
            (produce, (k_cache, v_cache, k_new, v_new, k_tiles, v_tiles, table, kv_head, past, end, shift, region_size, steps, k_places,
                       v_places, ready, free, NEW_STRIDE, KV_HEADS, DIM, BLOCK_SIZE, PAGED, TOGETHER, DESCRIBED, TILE,
                       STAGES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def prefill_divided(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    out: Tensor,
    lse: Tensor | None,
    fresh: tuple[Tensor, Tensor] | None,
    numbers: tuple[Any, ...],
    shared: dict[str, Any],
    tiles: Tiles,
) -> None:
    """The arguments are those of `paged_attention`; `numbers` and `shared` those of its kernels."""
    (heads, dim), kv_heads, rows = q.shape[1:], shared["KV_HEADS"], len(context_len)
    _, unit, _, table_width, region_size, _ = numbers
    new = fresh or (k_cache, v_cache)
    layout = gl.NVMMASharedLayout.get_default_for([tiles.keys, dim], gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16)
    descriptors = [
        TensorDescriptor(one, [len(one), kv_heads * dim], [one.stride(0), 1], [tiles.keys, dim], layout) if fresh else one for one in new
    ]
    prefill_hopper[(len(q) // (LINES * kv_heads // heads) + rows, kv_heads)](
        q, k_cache, v_cache, tables, query_start, context_len, out, out if lse is None else lse, *new, *descriptors, unit, table_width,
        region_size, rows, Q_STRIDE=q.stride(0), NEW_STRIDE=new[0].stride(0) if fresh else 0, HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
        BLOCK_SIZE=shared["BLOCK_SIZE"], PAGED=shared["PAGED"], TOGETHER=shared["TOGETHER"], DESCRIBED=fresh is not None,
        WITH_LSE=lse is not None, TILE=tiles.keys, STAGES=tiles.stages, **REGISTERS, num_warps=4,
    )  # fmt: skip
