"""Multi-head latent attention (MLA) around attention itself, in plain torch: from q and a latent to one key for all heads, and back.

    absorb    q of a head [ plain | rotary ]  ->  [ plain W_UK | rotated ]      a score with the cached key is then that of MLA
              latent, rotary key              ->  [ normed | rotated ]          the cached key
    expand    the weighted latents of a head  ->  times W_UV
"""

import torch
from torch import Tensor

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
    plain, turned = q.view(len(q), heads, -1).split([plain_heads // heads, rotary], dim=-1)
    matched = torch.einsum("thp,hpl->thl", plain, k_up.view(heads, -1, latent))
    normed = rms_norm(kv[:, :latent], norm[0], norm[1]).unsqueeze(1)
    turned = rotate(torch.cat([turned, kv[:, None, latent:]], dim=1), cos, sin)
    return torch.cat([torch.cat([matched, normed], dim=1), turned], dim=-1).flatten(1)


def expand(mixed: Tensor, v_up: Tensor) -> Tensor:
    """Returns the values of all heads [T, heads * value_dim]. mixed: [T, heads, latent]; v_up: W_UV [heads * value_dim, latent]"""
    heads = mixed.shape[1]
    return torch.einsum("thl,hvl->thv", mixed, v_up.view(heads, -1, mixed.shape[2])).flatten(1)
