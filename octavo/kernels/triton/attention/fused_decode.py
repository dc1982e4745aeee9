"""Decode attention for small batches from qkv on, in one kernel: norms of q and k, rotation, the write of k and v, and the splits.

    row's context   |-- split 0 --|-- split 1 --|-- split 2 --| new |        the new key and value are not read from the cache:
    a program       queries of a KV head (padded to 16, for tl.dot) x its    split 0 computes them in registers, and writes
                    split, tile by tile                                      them to their slot, which no program reads

The length and the number of splits grow with the context, so that a short context is not divided into pieces that cost more to merge
than they save, and a long one fills the GPU. Each program stores its part and the log-sum-exp; `merge_gemv` merges them. A head's
sink is a score without a value: only split 0, which every row has, counts it, as one more key.

    a head   [ x0 x1 x2 | y0 y1 y2 | rest ]     ROTARY dimensions are rotated, (xi, yi) together; the rest is unchanged
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cache_layout import tokens_together
from octavo.kernels.triton.attention.common import (
    HIDDEN,
    LOG2_E,
    LOG2E,
    LOWEST,
    capped,
    finish,
    load_lines,
    mix,
    place_of,
    places_of,
    weigh,
)
from octavo.kernels.triton.attention.tiles import MIN_DOT
from octavo.kernels.triton.gemv.tiles import DecodeTiles, decode_tiles
from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.norm import weighted


@triton.jit
def exchanged(dim, ROTARY: tl.constexpr):
    """The index of the dimension that each dimension is rotated with; itself, if it is not rotated."""
    HALF: tl.constexpr = ROTARY // 2
    return tl.where(dim < HALF, dim + HALF, tl.where(dim < ROTARY, dim - HALF, dim))


@triton.jit
def turned(head, other, scales, other_scales, eps, cos, sin, DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr):
    """Heads [N, DIM_TILE] normed and rotated, rounded as in the reference. `other`: the same, exchanged; sin includes its sign."""
    kind = head.dtype
    x, y = head.to(tl.float32), other.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = weighted(x * scale, scales[None, :], kind).to(tl.float32)
        y = weighted(y * scale, other_scales[None, :], kind).to(tl.float32)
    if ROTARY > 0:
        x = x * cos[None, :] + y * sin[None, :]
    return x.to(kind)


@triton.jit(do_not_specialize=["table_width", "window"])
def fused_decode(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos,
    sin,
    positions,
    slots,
    tables,
    context_len,
    k_cache,
    v_cache,
    parts,
    parts_lse,
    sinks,
    scale,
    unit,
    cap,
    table_width,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    NORM: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    LEAST_SHARE: tl.constexpr,
    LONG_SHARE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, DIM_TILE)
    other = exchanged(dim, ROTARY)
    whole = dim < DIM
    q_scales, q_scales_exchanged, k_scales, k_scales_exchanged = dim, dim, dim, dim
    if NORM:
        q_scales, q_scales_exchanged = tl.load(q_weight + dim, mask=whole, other=0.0), tl.load(q_weight + other, mask=whole, other=0.0)
        k_scales, k_scales_exchanged = tl.load(k_weight + dim, mask=whole, other=0.0), tl.load(k_weight + other, mask=whole, other=0.0)
    wait(PDL)
    length = tl.load(context_len + row).to(tl.int32)
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    member = tl.arange(0, GROUP_TILE)
    head = kv_head * GROUP + member
    present = member < GROUP
    line = qkv + row.to(tl.int64) * (HEADS + 2 * KV_HEADS) * DIM
    of_q = line + head[:, None] * DIM
    of_k = line + (HEADS + kv_head + member * 0)[:, None] * DIM  # the single new key and value, repeated for each query
    there = present[:, None] & whole[None, :]
    q = tl.load(of_q + dim[None, :], mask=there, other=0.0)
    q_exchanged = tl.load(of_q + other[None, :], mask=there, other=0.0)
    k = tl.load(of_k + dim[None, :], mask=whole[None, :], other=0.0)
    k_exchanged = tl.load(of_k + other[None, :], mask=whole[None, :], other=0.0)
    v = tl.load(of_k + KV_HEADS * DIM + dim[None, :], mask=whole[None, :], other=0.0)

    first = tl.maximum(length - window, 0) if WINDOWED else 0
    last = length - 1  # the position of the new token
    share = tl.minimum(tl.maximum(tl.cdiv(last - first, FEW_SPLITS), LEAST_SHARE), LONG_SHARE)
    share = tl.cdiv(tl.maximum(share, tl.cdiv(last - first, SPLITS)), TILE) * TILE
    low = first + split * share
    high = tl.minimum(low + share, last)
    at = (row.to(tl.int64) * SPLITS + split) * HEADS + head
    if (low >= high) & (split > 0):
        tl.store(parts_lse + at, tl.full([GROUP_TILE], float("-inf"), tl.float32), mask=present)
        return

        # The first tile is loaded before q is prepared, and each next one before its predecessor is used.
    table = tables + row.to(tl.int64) * table_width
    lane = tl.arange(0, TILE)
    inside = low + lane < high
    place = places_of(table, low + lane, inside, kv_head, 0, KV_HEADS, DIM, BLOCK_SIZE, True, TOGETHER)
    keys = load_lines(k_cache, place, inside, DIM, DIM_TILE, True)
    values = load_lines(v_cache, place, inside, DIM, DIM_TILE, True)

    c, s = dim.to(tl.float32), dim.to(tl.float32)
    if ROTARY > 0:
        angle = position * HALF + dim % HALF
        c = tl.load(cos + angle, mask=dim < ROTARY, other=1.0)
        s = tl.load(sin + angle, mask=dim < ROTARY, other=0.0)
        s = tl.where(dim < HALF, -s, s)
    queries = turned(q, q_exchanged, q_scales, q_scales_exchanged, eps, c, s, DIM, ROTARY, NORM)
    key = turned(k, k_exchanged, k_scales, k_scales_exchanged, eps, c, s, DIM, ROTARY, NORM)
    owner = (split == 0) & (length > 0)
    target = place_of(slot, kv_head, KV_HEADS, DIM, TOGETHER) + dim[None, :] + member[:, None] * 0
    written = (member == 0)[:, None] & whole[None, :] & owner
    tl.store(k_cache + target, key, mask=written)
    tl.store(v_cache + target, v, mask=written)

    own = capped(tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1), scale, cap, CAPPED)
    largest = tl.where(owner, own, LOWEST)
    total = tl.zeros([GROUP_TILE], tl.float32) + tl.where(owner, 1.0, 0.0)
    mixed = tl.where(owner, v.to(tl.float32), 0.0)
    if WITH_SINKS:
        sink = tl.load(sinks + head, mask=present & owner, other=float("-inf")).to(tl.float32) * (LOG2E / unit)
        largest = tl.maximum(largest, sink)
        fade = tl.where(owner, tl.exp2((own - largest) * unit), 0.0)
        total = fade + tl.where(owner, tl.exp2((sink - largest) * unit), 0.0)
        mixed *= fade[:, None]
    for start in range(low, high, TILE):
        following = start + TILE + lane
        more = following < high
        place = places_of(table, following, more, kv_head, 0, KV_HEADS, DIM, BLOCK_SIZE, True, TOGETHER)
        next_keys = load_lines(k_cache, place, more, DIM, DIM_TILE, True)
        next_values = load_lines(v_cache, place, more, DIM, DIM_TILE, True)
        scores = capped(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scale, cap, CAPPED)
        scores = tl.where(inside[None, :], scores, HIDDEN)
        largest, total, weights, fade = weigh(scores, largest, total, unit)
        mixed = mix(weights, fade, values, mixed)
        keys, values, inside = next_keys, next_values, more
    result, log_sum = finish(largest, total, mixed, unit)
    tl.store(parts + at[:, None] * DIM + dim[None, :], result, mask=there)
    tl.store(parts_lse + at, log_sum, mask=present)


def decode_attention_parts(
    qkv: Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k [head_dim], of qkv's dtype or float32, eps
    cos: Tensor,  # [max_position, rotated / 2] float32, for the first dimensions of a head; without columns, nothing is rotated
    sin: Tensor,
    positions: Tensor,  # [rows]
    slots: Tensor,  # [rows]
    tables: Tensor,  # [rows, B]
    context_len: Tensor,  # tokens, including the new one; 0 is padding, which writes nothing
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim] in any layout
    v_cache: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
    splits: int | None = None,  # maximum number of splits of a context; by default as many as the widest table needs
    tiles: DecodeTiles | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """(parts [rows, splits, heads, head_dim], their log-sum-exp [rows, splits, heads] in units of log2), both float32"""
    size, kv_heads, head_dim = k_cache.shape[1:]
    rows, heads = len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads
    _check(qkv, k_cache, v_cache, tables, cos)
    assert positions.is_contiguous() and slots.is_contiguous() and context_len.is_contiguous()
    chosen = tiles or decode_tiles(qkv.dtype, rows, tables.shape[1] * size, head_dim, heads, kv_heads)
    splits = splits or chosen.splits
    parts = torch.empty(rows, splits, heads, head_dim, dtype=torch.float32, device=qkv.device)
    parts_lse = torch.empty(rows, splits, heads, dtype=torch.float32, device=qkv.device)
    q_weight, k_weight, eps = norms or (qkv, qkv, 0.0)
    pdl = pdl and use_pdl()
    if rows:
        fused_decode[(rows, kv_heads, splits)](
            qkv, q_weight, k_weight, eps, cos, sin, positions, slots, tables, context_len, k_cache, v_cache, parts, parts_lse,
            qkv if sinks is None else sinks, scale, LOG2_E * (scale if soft_cap is None else 1.0), soft_cap or 0.0, tables.stride(0),
            window or 0, HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim, DIM_TILE=triton.next_power_of_2(head_dim),
            ROTARY=2 * cos.shape[1], GROUP_TILE=max(triton.next_power_of_2(heads // kv_heads), MIN_DOT),
            BLOCK_SIZE=size, TOGETHER=tokens_together(k_cache), NORM=norms is not None, WINDOWED=window is not None,
            CAPPED=soft_cap is not None, WITH_SINKS=sinks is not None, SPLITS=splits,
            FEW_SPLITS=chosen.few_splits, LEAST_SHARE=chosen.least_share, LONG_SHARE=chosen.long_share, TILE=chosen.keys,
            PDL=pdl, num_warps=chosen.warps, num_stages=1, launch_pdl=pdl,
        )  # fmt: skip
    return parts, parts_lse


def _check(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, cos: Tensor) -> None:
    size, kv_heads, head_dim = k_cache.shape[1:]
    assert head_dim % 16 == 0 and head_dim <= 256, f"head_dim {head_dim}"
    assert size == triton.next_power_of_2(size) and size <= 256, f"block size {size}"
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert heads > 0 and heads % kv_heads == 0, f"{heads} heads over {kv_heads} KV heads"
    assert qkv.is_contiguous() and qkv.dtype == k_cache.dtype and tables.stride(1) == 1
    assert cos.dtype == torch.float32 and 2 * cos.shape[1] <= head_dim
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride()
