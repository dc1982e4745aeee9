"""Multi-head latent attention (MLA) around attention itself, in plain torch: from q and a latent to one key for all heads, and back.

    absorb          q of a head [ plain | rotary ]  ->  [ plain W_UK | rotated ]      a score with the cached key is then that of MLA
                    latent, rotary key              ->  [ normed | rotated ]          the cached key
    write_latent    the same, with the key stored in its slot
    expand          the weighted latents of a head  ->  times W_UV
"""

import torch
from torch import Tensor

from octavo.kernels.reference.attention import paged_attention
from octavo.kernels.reference.layer import rms_norm, rotate


def absorb(
    q: Tensor,  # [T, heads * (plain_dim + rotary_dim)]
    kv: Tensor,  # [T, latent + rotary_dim]
    k_up: Tensor,  # W_UK: [heads * plain_dim, latent]
    norm: tuple[Tensor, float],  # of the latent: weight [latent], eps
    cos: Tensor,  # [T, rotary_dim / 2] float32, for the positions of these tokens
    sin: Tensor,
) -> Tensor:
    """Returns q of all heads, and the key behind them [T, (heads + 1) * (latent + rotary_dim)]."""
    (plain_heads, latent), rotary = k_up.shape, 2 * cos.shape[1]
    heads = (q.shape[1] - plain_heads) // rotary
    plain, turned = q.unflatten(1, (heads, -1)).split([plain_heads // heads, rotary], dim=-1)
    matched = torch.einsum("thp,hpl->thl", plain, k_up.view(heads, -1, latent))
    normed = rms_norm(kv[:, :latent], norm[0], norm[1]).unsqueeze(1)
    turned = rotate(torch.cat([turned, kv[:, None, latent:]], dim=1), cos, sin)
    return torch.cat([torch.cat([matched, normed], dim=1), turned], dim=-1).flatten(1)


def expand(mixed: Tensor, v_up: Tensor) -> Tensor:
    """Returns the values of all heads [T, heads * value_dim]. mixed: [T, heads, latent]; v_up: W_UV [heads * value_dim, latent]"""
    heads = mixed.shape[1]
    return torch.einsum("thl,hvl->thv", mixed, v_up.view(heads, -1, mixed.shape[2])).flatten(1)


# -- references of GPU kernels


def write_latent(
    q: Tensor,  # [T, heads * (plain_dim + rotary_dim)]
    kv: Tensor,  # [T, latent + rotary_dim]
    k_up: Tensor,  # W_UK: [heads * plain_dim, latent]
    norm: tuple[Tensor, float],  # of the latent: weight [latent], eps
    cos: Tensor,  # [max_position, rotary_dim / 2] float32
    sin: Tensor,
    positions: Tensor,  # [T]
    slots: Tensor,  # [T]; below 0: the token is not stored
    cache: Tensor,  # [num_blocks, block_size, 1, latent + rotary_dim]
) -> Tensor:
    """Stores the key of each token in its slot. Returns q of all heads [T, heads, latent + rotary_dim]."""
    both = absorb(q, kv, k_up, norm, cos[positions], sin[positions]).view(len(q), -1, kv.shape[1])
    stored = slots >= 0
    places = slots[stored] // cache.shape[1], slots[stored] % cache.shape[1]
    cache[places] = both[stored, -1:]
    return both[:, :-1].contiguous()


def latent_attention(
    q: Tensor,  # [T, heads, latent + rotary_dim]
    cache: Tensor,  # [num_blocks, block_size, 1, latent + rotary_dim]; not paged: [num_rows, max_len, 1, latent + rotary_dim]
    tables: Tensor,  # [R, B]; not paged: [R, 1], the region of each row
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    scale: float,
    out: Tensor,  # [T, heads, latent]
) -> Tensor:
    """Fills and returns `out`, the weighted latents: attention whose values are the first numbers of the keys."""
    return paged_attention(q, cache, cache[..., : out.shape[2]], tables, query_start, context_len, scale, out)
