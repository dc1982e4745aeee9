"""Decode attention of a few rows from qkv on, in one kernel: norms of q and k, rotation, the write of k and v, and the splits.

    row's context   |-- split 0 --|-- split 1 --|-- split 2 --| new |        the new key and value never come out of the cache:
    a program       queries of a KV head (padded to 16, for tl.dot) x its    split 0 has them in registers, where it made them, and
                    split, tile by tile                                      writes them to their slot, which no program reads

The splits grow with the context, and so does their number, so that a short context is not cut to pieces that cost more to merge
than they gain, and a long one fills the GPU. Each program leaves its part and its log-sum-exp; the one that comes last, by a count
of arrivals, merges them all, in the order of the splits, so that it does not matter who that is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.attention_parts import HIDDEN, LOG2_E, LOWEST, finish, mix, slots_of, weigh
from octavo.kernels.triton.attention_tiles import MIN_DOT
from octavo.kernels.triton.dependent import begin, can_depend, wait
from octavo.kernels.triton.few_tiles import DecodeTiles, decode_tiles

TOGETHER = tl.constexpr(16)  # splits read at once


@triton.jit
def turned(head, exchanged, scales, scales_exchanged, eps, cos, sin, DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads [N, DIM] normed and rotated, rounded as the twin does. `exchanged`: the same, halves exchanged; sin has its sign."""
    kind = head.dtype
    x, y = head.to(tl.float32), exchanged.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = ((x * scale).to(kind).to(tl.float32) * scales.to(tl.float32)[None, :]).to(kind).to(tl.float32)
        y = ((y * scale).to(kind).to(tl.float32) * scales_exchanged.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    return (x * cos[None, :] + y * sin[None, :]).to(kind)


@triton.jit
def merged(parts, parts_lse, used, GROUP: tl.constexpr, MEMBERS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):
    """The first `used` splits of one KV head's queries, [1, MEMBERS, DIM]. parts [splits, HEADS, DIM]

    Read around the L1, which other programs' writes do not reach.
    """
    split = tl.arange(0, TOGETHER)[:, None, None]
    member = tl.arange(0, MEMBERS)[None, :, None]
    dim = tl.arange(0, DIM)[None, None, :]
    largest = tl.full([1, MEMBERS, 1], HIDDEN, tl.float32)
    total = tl.zeros([1, MEMBERS, 1], tl.float32)
    mixed = tl.zeros([1, MEMBERS, DIM], tl.float32)
    for start in range(0, used, TOGETHER):
        wanted = (start + split < used) & (member < GROUP)
        at = (start + split) * HEADS + member
        log_sum = tl.load(parts_lse + at, mask=wanted, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(parts + at * DIM + dim, mask=wanted & (dim < DIM), other=0.0, cache_modifier=".cg")
        now = tl.maximum(largest, tl.max(log_sum, 0, keep_dims=True))
        weights, fade = tl.exp2(log_sum - now), tl.exp2(largest - now)
        total = total * fade + tl.sum(weights, 0, keep_dims=True)
        mixed = mixed * fade + tl.sum(part * weights, 0, keep_dims=True)
        largest = now
    return mixed / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=["table_width", "window"])
def decode_few(
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
    arrivals,
    parts,
    parts_lse,
    out,
    unit,
    table_width,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLITS: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    LEAST_SHARE: tl.constexpr,
    LONG_SHARE: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    begin(DEPENDENT)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    dim = tl.arange(0, DIM)
    other = (dim + HALF) % DIM
    q_scales, q_scales_exchanged, k_scales, k_scales_exchanged = dim, dim, dim, dim
    if NORM:
        q_scales, q_scales_exchanged = tl.load(q_weight + dim), tl.load(q_weight + other)
        k_scales, k_scales_exchanged = tl.load(k_weight + dim), tl.load(k_weight + other)
    wait(DEPENDENT)
    length = tl.load(context_len + row).to(tl.int32)
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    member = tl.arange(0, GROUP_TILE)
    head = kv_head * GROUP + member
    present = member < GROUP
    line = qkv + row.to(tl.int64) * (HEADS + 2 * KV_HEADS) * DIM
    of_q = line + head[:, None] * DIM
    of_k = line + (HEADS + kv_head + member * 0)[:, None] * DIM  # the one new key and value, once for each query
    q = tl.load(of_q + dim[None, :], mask=present[:, None], other=0.0)
    q_exchanged = tl.load(of_q + other[None, :], mask=present[:, None], other=0.0)
    k, k_exchanged = tl.load(of_k + dim[None, :]), tl.load(of_k + other[None, :])
    v = tl.load(of_k + KV_HEADS * DIM + dim[None, :])

    first = tl.maximum(length - window, 0) if WINDOWED else 0
    last = length - 1  # the new token's place
    share = tl.minimum(tl.maximum(tl.cdiv(last - first, FEW_SPLITS), LEAST_SHARE), LONG_SHARE)
    share = tl.cdiv(tl.maximum(share, tl.cdiv(last - first, SPLITS)), TILE) * TILE
    used = tl.maximum(tl.cdiv(last - first, share), 1)
    if split >= used:
        return
    low = first + split * share
    high = tl.minimum(low + share, last)

    # The first tile is asked for before q is made ready, each next one before its predecessor is used.
    table = tables + row.to(tl.int64) * table_width
    lane = tl.arange(0, TILE)
    inside = low + lane < high
    place = (slots_of(table, low + lane, inside, 0, BLOCK_SIZE, True) * KV_HEADS + kv_head) * DIM
    keys = tl.load(k_cache + place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    values = tl.load(v_cache + place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)

    angle = position * HALF + dim % HALF
    c, s = tl.load(cos + angle), tl.load(sin + angle)
    s = tl.where(dim < HALF, -s, s)
    queries = turned(q, q_exchanged, q_scales, q_scales_exchanged, eps, c, s, DIM, NORM)
    key = turned(k, k_exchanged, k_scales, k_scales_exchanged, eps, c, s, DIM, NORM)
    owner = (split == 0) & (length > 0)
    place_of_new = (slot * KV_HEADS + kv_head) * DIM + dim[None, :] + member[:, None] * 0
    tl.store(k_cache + place_of_new, key, mask=(member == 0)[:, None] & owner)
    tl.store(v_cache + place_of_new, v, mask=(member == 0)[:, None] & owner)

    largest = tl.where(owner, tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1), LOWEST)
    total = tl.zeros([GROUP_TILE], tl.float32) + tl.where(owner, 1.0, 0.0)
    mixed = tl.where(owner, v.to(tl.float32), 0.0)
    for start in range(low, high, TILE):
        following = start + TILE + lane
        more = following < high
        place = (slots_of(table, following, more, 0, BLOCK_SIZE, True) * KV_HEADS + kv_head) * DIM
        next_keys = tl.load(k_cache + place[:, None] + dim[None, :], mask=more[:, None], other=0.0)
        next_values = tl.load(v_cache + place[:, None] + dim[None, :], mask=more[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(queries, tl.trans(keys), input_precision="ieee"), HIDDEN)
        largest, total, weights, fade = weigh(scores, largest, total, unit)
        mixed = mix(weights, fade, values, mixed)
        keys, values, inside = next_keys, next_values, more
    result, log_sum = finish(largest, total, mixed, unit)

    kind = out.dtype.element_ty
    target = out + row.to(tl.int64) * HEADS * DIM
    if used == 1:
        tl.store(target + head[:, None] * DIM + dim[None, :], result.to(kind), mask=present[:, None])
    else:
        first_part = row.to(tl.int64) * SPLITS * HEADS
        at = first_part + split * HEADS + head
        tl.store(parts + at[:, None] * DIM + dim[None, :], result, mask=present[:, None])
        tl.store(parts_lse + at, log_sum, mask=present)
        tl.debug_barrier()  # all threads have written what the count below makes known
        count = arrivals + row * KV_HEADS + kv_head
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(count, 0)  # for the next kernel
            first_part += kv_head * GROUP
            whole = merged(parts + first_part * DIM, parts_lse + first_part, used, GROUP, MEMBERS, HEADS, DIM).to(kind)
            member_dim = tl.arange(0, MEMBERS)[None, :, None] * DIM + tl.arange(0, DIM)[None, None, :]
            tl.store(target + kv_head * GROUP * DIM + member_dim, whole, mask=member_dim < GROUP * DIM)


def decode_attention(
    qkv: Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k [head_dim], eps
    cos: Tensor,  # [max_position, head_dim / 2] float32
    sin: Tensor,
    positions: Tensor,  # [rows]
    slots: Tensor,  # [rows]
    tables: Tensor,  # [rows, B]
    context_len: Tensor,  # [rows]: tokens, the new one included; 0 is padding, which writes nothing and yields zeros
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
    arrivals: Tensor,  # [rows * kv_heads or more] int32, zero; zero again afterwards. Nobody else's while this runs
    scale: float,
    window: int | None = None,
    tiles: DecodeTiles | None = None,
    dependent: bool = True,
) -> Tensor:
    """Writes the new keys and values to their slots, and returns attention over each row's context [rows, heads * head_dim]."""
    size, kv_heads, head_dim = k_cache.shape[1:]
    rows, heads = len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads
    _check(qkv, k_cache, v_cache, tables, cos)
    assert positions.is_contiguous() and slots.is_contiguous() and context_len.is_contiguous()
    assert arrivals.dtype == torch.int32 and arrivals.is_contiguous() and arrivals.numel() >= rows * kv_heads
    chosen = tiles or decode_tiles(qkv.dtype, rows, tables.shape[1] * size, head_dim)
    out = torch.empty(rows, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    parts = torch.empty(rows, chosen.splits, heads, head_dim, dtype=torch.float32, device=qkv.device)
    parts_lse = torch.empty(rows, chosen.splits, heads, dtype=torch.float32, device=qkv.device)
    q_weight, k_weight, eps = norms or (qkv, qkv, 0.0)
    members = triton.next_power_of_2(heads // kv_heads)
    dependent = dependent and can_depend()
    if rows:
        decode_few[(rows, kv_heads, chosen.splits)](
            qkv, q_weight, k_weight, eps, cos, sin, positions, slots, tables, context_len, k_cache, v_cache, arrivals, parts, parts_lse,
            out, scale * LOG2_E, tables.stride(0), window or 0,
            HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim, GROUP_TILE=max(members, MIN_DOT), MEMBERS=members,
            BLOCK_SIZE=size, NORM=norms is not None, WINDOWED=window is not None, SPLITS=chosen.splits, FEW_SPLITS=chosen.few_splits,
            LEAST_SHARE=chosen.least_share, LONG_SHARE=chosen.long_share, TILE=chosen.keys, DEPENDENT=dependent,
            num_warps=chosen.warps, num_stages=1, launch_pdl=dependent,
        )  # fmt: skip
    return out


def _check(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, cos: Tensor) -> None:
    size, kv_heads, head_dim = k_cache.shape[1:]
    assert head_dim == triton.next_power_of_2(head_dim) and 16 <= head_dim <= 256, f"head_dim {head_dim}"
    assert size == triton.next_power_of_2(size) and size <= 256, f"block size {size}"
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert heads > 0 and heads % kv_heads == 0, f"{heads} heads over {kv_heads} KV heads"
    assert qkv.is_contiguous() and qkv.dtype == k_cache.dtype and tables.stride(1) == 1 and cos.dtype == torch.float32
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
