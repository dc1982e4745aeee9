"""New tokens into the cache: norm of each head (optional), rotation, and the write of k and v to their slots, in one kernel.

    qkv    [T, q: heads | k: kv_heads | v: kv_heads]      q and k are normed and rotated in place; k and v go to the cache

So prefill finds this step's keys and values side by side in qkv, without a look at the tables. One program takes one token's q,
k or v with all its heads. Halves of a head are loaded apart: dimension i and i + head_dim/2 are turned together. Roundings are
those of the twin: after the norm, after its weight, after the rotation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cache_layout import tokens_together
from octavo.kernels.triton.attention.common import place_of
from octavo.kernels.triton.pdl import begin, use_pdl, wait


@triton.jit
def rms_scale(first, second, eps, DIM: tl.constexpr):
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]


@triton.jit
def write(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos,
    sin,
    positions,
    slots,
    k_cache,
    v_cache,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    NORM: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # part: q, k or v
    HALF: tl.constexpr = DIM // 2
    kind = qkv.dtype.element_ty
    num_heads = tl.where(part == 0, HEADS, KV_HEADS)
    first_head = tl.where(part == 0, 0, tl.where(part == 1, HEADS, HEADS + KV_HEADS))
    head, half = tl.arange(0, HEADS_TILE)[:, None], tl.arange(0, HALF_TILE)[None, :]
    present = (head < num_heads) & (half < HALF)
    source = qkv + token * STRIDE + (first_head + head) * DIM + half
    wait(PDL)
    first = tl.load(source, mask=present, other=0.0)
    second = tl.load(source + HALF, mask=present, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    target = place_of(slot, head, KV_HEADS, DIM, TOGETHER) + half
    if part == 2:
        tl.store(v_cache + target, first, mask=present)
        tl.store(v_cache + target + HALF, second, mask=present)
    else:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            weight = (q_weight if part == 0 else k_weight) + half
            scale = rms_scale(x, y, eps, DIM)
            weight_x, weight_y = tl.load(weight, mask=half < HALF), tl.load(weight + HALF, mask=half < HALF)
            x = ((x * scale).to(kind).to(tl.float32) * weight_x.to(tl.float32)).to(kind).to(tl.float32)
            y = ((y * scale).to(kind).to(tl.float32) * weight_y.to(tl.float32)).to(kind).to(tl.float32)
        angle = tl.load(positions + token).to(tl.int64) * HALF + half
        c, s = tl.load(cos + angle, mask=half < HALF), tl.load(sin + angle, mask=half < HALF)
        turned_x, turned_y = (x * c - y * s).to(kind), (y * c + x * s).to(kind)
        tl.store(source, turned_x, mask=present)
        tl.store(source + HALF, turned_y, mask=present)
        if part == 1:
            tl.store(k_cache + target, turned_x, mask=present)
            tl.store(k_cache + target + HALF, turned_y, mask=present)


def write_kv(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k [head_dim], eps
    cos: Tensor,  # [max_position, head_dim / 2] float32
    sin: Tensor,
    positions: Tensor,  # [T]
    slots: Tensor,  # [T]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim] in any layout
    v_cache: Tensor,
) -> Tensor:
    """Returns q [T, heads, head_dim], a view of qkv; q and k are overwritten there."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert head_dim % 2 == 0, f"head_dim {head_dim}"
    assert qkv.is_contiguous() and k_cache.stride() == v_cache.stride() and cos.dtype == torch.float32
    q_weight, k_weight, eps = norms or (qkv, qkv, 0.0)
    if len(qkv):
        write[(len(qkv), 3)](
            qkv, q_weight, k_weight, eps, cos, sin, positions, slots, k_cache, v_cache,
            STRIDE=qkv.shape[1], HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim, HALF_TILE=triton.next_power_of_2(head_dim // 2),
            HEADS_TILE=triton.next_power_of_2(max(heads, kv_heads)), NORM=norms is not None,
            TOGETHER=tokens_together(k_cache), PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
        )  # fmt: skip
    return qkv.view(len(qkv), -1, head_dim)[:, :heads]
