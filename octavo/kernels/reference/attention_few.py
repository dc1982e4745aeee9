"""The twin of decode attention in one kernel: the cache write, then attention over the cache."""

import torch
from torch import Tensor

from octavo.kernels.reference.paged_attention import paged_attention
from octavo.kernels.reference.write_kv import write_kv


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
    arrivals: Tensor | None,  # what the kernel counts its splits by
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Writes the new keys and values to their slots, and returns attention over each row's context [rows, heads * head_dim]."""
    kv_heads, head_dim = k_cache.shape[2:]
    rows = context_len.nonzero().squeeze(1)
    q = write_kv(qkv[rows], norms, cos, sin, positions[rows].long(), slots[rows].long(), k_cache, v_cache)
    starts = torch.arange(len(rows) + 1)
    mixed = paged_attention(q, k_cache, v_cache, tables[rows], starts, context_len[rows], scale, torch.empty_like(q), window)
    out = qkv.new_zeros(len(qkv), qkv.shape[1] - 2 * kv_heads * head_dim)
    out[rows] = mixed.flatten(1)
    return out
