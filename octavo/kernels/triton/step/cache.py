"""Writes to the cache: `write_kv` puts in the keys and values of new tokens, `copy_blocks` copies whole blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cache_layout import tokens_together
from octavo.kernels.triton.attention.common import place_of
from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.norm import weighted

PIECE = 2048  # words of four bytes that a program copies

# -- new tokens: norm of q and k (optional), rotation, and the write of k and v to their slots, in one kernel
#
#     qkv    [T, q: heads | k: kv_heads | v: kv_heads]      q and k are normed and rotated in place; k and v go to the cache
#     a head [ first: HALF | second: HALF | rest ]          first and second are rotated together; without rotation they are only separated
#
# So prefill finds this step's keys and values contiguous in qkv, without reading the tables. One program processes one token's q,
# k or v with all its heads, so that a norm over all of them (WHOLE) costs no more than one over each. Rounding matches the
# reference: after the norm, after its weight, after the rotation.


@triton.jit
def load_head(base, half, tail, present, HALF: tl.constexpr, DIM: tl.constexpr):
    """(first, second, rest) of the head at `base`; rest is unused if there is none."""
    first = tl.load(base + half, mask=present & (half < HALF), other=0.0)
    second = tl.load(base + HALF + half, mask=present & (half < HALF), other=0.0)
    rest = first
    if 2 * HALF < DIM:
        rest = tl.load(base + tail, mask=present & (tail < DIM), other=0.0)
    return first, second, rest


@triton.jit
def store_head(base, half, tail, present, first, second, rest, HALF: tl.constexpr, DIM: tl.constexpr):
    tl.store(base + half, first, mask=present & (half < HALF))
    tl.store(base + HALF + half, second, mask=present & (half < HALF))
    if 2 * HALF < DIM:
        tl.store(base + tail, rest, mask=present & (tail < DIM))


@triton.jit
def rms_scale(first, second, rest, eps, num_heads, HALF: tl.constexpr, DIM: tl.constexpr, WHOLE: tl.constexpr):
    """The inverse RMS: [heads, 1], or [1, 1] for all heads together."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if 2 * HALF < DIM:
        squares += tl.sum(rest * rest, 1)
    if WHOLE:
        squares = tl.sum(squares, 0, keep_dims=True) / num_heads
    return tl.rsqrt(squares / DIM + eps)[:, None]


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
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # part: q, k or v
    kind = qkv.dtype.element_ty
    num_heads = tl.where(part == 0, HEADS, KV_HEADS)
    first_head = tl.where(part == 0, 0, tl.where(part == 1, HEADS, HEADS + KV_HEADS))
    head, half = tl.arange(0, HEADS_TILE)[:, None], tl.arange(0, HALF_TILE)[None, :]
    tail = 2 * HALF + tl.arange(0, TAIL_TILE)[None, :]
    present = head < num_heads
    base = qkv + token * STRIDE + (first_head + head) * DIM
    wait(PDL)
    first, second, rest = load_head(base, half, tail, present, HALF, DIM)
    slot = tl.load(slots + token).to(tl.int64)
    target, kept = place_of(slot, head, KV_HEADS, DIM, TOGETHER), present & (slot >= 0)  # padding has no slot
    if part == 2:
        store_head(v_cache + target, half, tail, kept, first, second, rest, HALF, DIM)
    else:
        x, y, z = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
        if NORM:
            weight = (q_weight if part == 0 else k_weight) + head * (DIM if WHOLE else 0)
            weights = load_head(weight, half, tail, present, HALF, DIM)
            scale = rms_scale(x, y, z, eps, num_heads, HALF, DIM, WHOLE)
            first, second = weighted(x * scale, weights[0], kind), weighted(y * scale, weights[1], kind)
            rest = weighted(z * scale, weights[2], kind)
            x, y = first.to(tl.float32), second.to(tl.float32)
        if TURNED:
            angle = tl.load(positions + token).to(tl.int64) * HALF + half
            c, s = tl.load(cos + angle, mask=half < HALF), tl.load(sin + angle, mask=half < HALF)
            first, second = (x * c - y * s).to(kind), (y * c + x * s).to(kind)
        if NORM or TURNED:
            store_head(base, half, tail, present, first, second, rest, HALF, DIM)
        if part == 1:
            store_head(k_cache + target, half, tail, kept, first, second, rest, HALF, DIM)


def write_kv(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]; tokens may be strided, as where a gate is beside them
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k, [head_dim] or of all heads, of qkv's dtype or float32, eps
    cos: Tensor,  # [max_position, rotated / 2] float32, for the first dimensions of a head; without columns, nothing is rotated
    sin: Tensor,
    positions: Tensor,  # [T]
    slots: Tensor,  # [T]; below 0: the token is not stored
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim] in any layout
    v_cache: Tensor,
) -> Tensor:
    """Returns q [T, heads, head_dim], a view of qkv; q and k are overwritten there."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    half = cos.shape[1] or head_dim // 2
    assert head_dim % 2 == 0 and 2 * half <= head_dim, f"head_dim {head_dim}, of which {2 * half} are rotated"
    assert qkv.stride(1) == 1 and k_cache.stride() == v_cache.stride() and cos.dtype == torch.float32
    q_weight, k_weight, eps = norms or (qkv, qkv, 0.0)
    if len(qkv):
        write[(len(qkv), 3)](
            qkv, q_weight, k_weight, eps, cos, sin, positions, slots, k_cache, v_cache,
            STRIDE=qkv.stride(0), HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim, HALF=half, HALF_TILE=triton.next_power_of_2(half),
            TAIL_TILE=triton.next_power_of_2(max(head_dim - 2 * half, 1)), HEADS_TILE=triton.next_power_of_2(max(heads, kv_heads)),
            NORM=norms is not None, WHOLE=norms is not None and len(q_weight) > head_dim, TURNED=cos.shape[1] > 0,
            TOGETHER=tokens_together(k_cache), PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
        )  # fmt: skip
    return qkv.as_strided((len(qkv), heads, head_dim), (qkv.stride(0), head_dim, 1))  # a view would change the stride of a single token


# -- copies of whole blocks, in every layer's buffers at once: one launch for all pairs and all buffers
#
#     froms, tos   [buffers]     the addresses of buffers; buffers with the same block size may be anywhere
#     grid         (pairs, buffers, pieces of a block)
#
# All reads come before any write. If one pair reads a block that another writes, blocks go through temporary memory, in
# two launches; usually none does, and one launch is enough.


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])  # targets follow sources in memory, at any offset
def copy(froms, tos, sources, targets, WORDS: tl.constexpr, PIECE: tl.constexpr):
    pair, buffer = tl.program_id(0), tl.program_id(1)
    word = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    inside = word < WORDS
    source = tl.multiple_of(tl.load(froms + buffer).to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(tl.load(tos + buffer).to(tl.pointer_type(tl.int32)), 16)
    moved = tl.load(source + tl.load(sources + pair) * WORDS + word, mask=inside)
    tl.store(target + tl.load(targets + pair) * WORDS + word, moved, mask=inside)


def copy_blocks(buffers: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copies block `source` onto block `target` for every pair. buffers: each [num_blocks, ...], with blocks of equal size in bytes"""
    device = buffers[0].device
    size = buffers[0][0].numel() * buffers[0].element_size()
    assert size % 16 == 0, f"{size} bytes a block"
    assert all(b.stride(0) * b.element_size() == size and b.data_ptr() % 16 == 0 and b[0].numel() == b.stride(0) for b in buffers)
    starts, froms, tos = [b.data_ptr() for b in buffers], [source for source, _ in pairs], [target for _, target in pairs]
        # from pinned memory: any other upload would wait for the device
    sent = torch.tensor([*starts, *froms, *tos], dtype=torch.int64, pin_memory=buffers[0].is_cuda).to(device, non_blocking=True)
    addresses, sources, targets = sent.split([len(buffers), len(pairs), len(pairs)])
    grid = (len(pairs), len(buffers), triton.cdiv(size, 4 * PIECE))
    fixed = {"WORDS": size // 4, "PIECE": PIECE, "num_warps": 4}
    if not set(froms) & set(tos):
        copy[grid](addresses, addresses, sources, targets, **fixed)
        return
    aside = torch.empty(len(buffers), len(pairs), size, dtype=torch.uint8, device=device)
    places = aside.data_ptr() + torch.arange(len(buffers), device=device) * aside.stride(0)
    order = torch.arange(len(pairs), device=device)
    copy[grid](addresses, places, sources, order, **fixed)
    copy[grid](places, addresses, order, targets, **fixed)
