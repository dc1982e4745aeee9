"""What is around attention over latents: q and the new key before it, and the values of heads behind it.

    q of a head     [ plain | rotary ]  ->  [ plain W_UK | rotated ]     a product of each head by torch; the rest by one kernel
    of the token    [ latent | rotary ]  ->  [ normed | rotated ]        straight to its slot in the cache

Rounding matches the reference: after the norm, after its weight, after the rotation.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.norm import normed


@triton.jit
def rotate(source, target, half, present, cos, sin, angle, HALF: tl.constexpr):
    """Rotates the heads [N, 2 * HALF] at `source`, and stores them at `target`."""
    inside = present & (half < HALF)
    first = tl.load(source + half, mask=inside, other=0.0)
    x, y = first.to(tl.float32), tl.load(source + HALF + half, mask=inside, other=0.0).to(tl.float32)
    c, s = tl.load(cos + angle, mask=half < HALF, other=0.0), tl.load(sin + angle, mask=half < HALF, other=0.0)
    tl.store(target + half, (x * c - y * s).to(first.dtype), mask=inside)
    tl.store(target + HALF + half, (y * c + x * s).to(first.dtype), mask=inside)


@triton.jit
def write_latents(
    q,
    kv,
    weight,
    eps,
    cos,
    sin,
    positions,
    slots,
    cache,
    out,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    PLAIN: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last program of a token has its key, the others have some heads of q each."""
    begin(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, HALF_TILE)[None, :]
    wait(PDL)
    angle = tl.load(positions + token).to(tl.int64) * HALF + half
    if part < tl.num_programs(1) - 1:
        head = part * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
        source, target = q + token * Q_STRIDE + head * (PLAIN + 2 * HALF) + PLAIN, out + (token * HEADS + head) * (RANK + 2 * HALF) + RANK
        rotate(source, target, half, head < HEADS, cos, sin, angle, HALF)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:  # padding has none
            source, target = kv + token * KV_STRIDE, cache + slot * (RANK + 2 * HALF)
            dim = tl.arange(0, RANK_TILE)
            latent, scale = tl.load(source + dim, mask=dim < RANK, other=0.0), tl.load(weight + dim, mask=dim < RANK, other=0.0)
            tl.store(target + dim, normed(latent.to(tl.float32), scale, eps, RANK, latent.dtype), mask=dim < RANK)
            rotate(source + RANK, target + RANK, half, half >= 0, cos, sin, angle, HALF)


HEADS_AT_ONCE = 32  # of q, in a program


def write_latent(
    q: Tensor,  # [T, heads * (plain_dim + rotary_dim)]; tokens may be strided, as where they are projected together with kv
    kv: Tensor,  # [T, latent + rotary_dim]
    k_up: Tensor,  # W_UK: [heads * plain_dim, latent]
    norm: tuple[Tensor, float],  # of the latent: weight [latent], eps
    cos: Tensor,  # [max_position, rotary_dim / 2] float32
    sin: Tensor,
    positions: Tensor,  # [T]
    slots: Tensor,  # [T]; below 0: the token is not stored
    cache: Tensor,  # [num_blocks, block_size, 1, latent + rotary_dim]
    multiply: Callable[[Tensor, Tensor, Tensor], object] | None = None,  # the product of each head, into its third argument
) -> Tensor:
    """Stores the key of each token in its slot. Returns q of all heads [T, heads, latent + rotary_dim]."""
    (plain_heads, rank), half, tokens = k_up.shape, cos.shape[1], len(q)
    heads = (q.shape[1] - plain_heads) // (2 * half)
    plain = plain_heads // heads
    assert q.stride(1) == kv.stride(1) == 1 and cache.is_contiguous() and cache.shape[2:] == (1, rank + 2 * half)
    assert kv.shape == (tokens, rank + 2 * half) and k_up.is_contiguous() and cos.dtype == torch.float32
    out = torch.empty(tokens, heads, rank + 2 * half, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    by_head = q.as_strided((heads, tokens, plain), (plain + 2 * half, q.stride(0), 1))
    (multiply or _multiply)(by_head, k_up.view(heads, plain, rank), out[:, :, :rank].transpose(0, 1))
    heads_tile = min(triton.next_power_of_2(heads), HEADS_AT_ONCE)
    write_latents[(tokens, triton.cdiv(heads, heads_tile) + 1)](
        q, kv, *norm, cos, sin, positions, slots, cache, out, Q_STRIDE=q.stride(0), KV_STRIDE=kv.stride(0), HEADS=heads,
        HEADS_TILE=heads_tile, PLAIN=plain, RANK=rank, RANK_TILE=triton.next_power_of_2(rank), HALF=half,
        HALF_TILE=triton.next_power_of_2(half), PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
    )  # fmt: skip
    return out


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.bmm(x, weight, out=out)


def expand(mixed: Tensor, v_up: Tensor) -> Tensor:
    """Returns the values of all heads [T, heads * value_dim]. mixed: [T, heads, latent]; v_up: W_UV [heads * value_dim, latent]"""
    (tokens, heads, rank), size = mixed.shape, len(v_up) // mixed.shape[1]
    out = torch.empty(tokens, heads, size, dtype=mixed.dtype, device=mixed.device)
    torch.bmm(mixed.transpose(0, 1), v_up.view(heads, size, rank).transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)
