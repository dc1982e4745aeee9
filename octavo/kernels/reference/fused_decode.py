"""The twin of decode attention in one kernel: the cache write, then attention over the cache, all of it as the first split."""

import math

import torch
from torch import Tensor

from octavo.kernels.reference.paged_attention import paged_attention
from octavo.kernels.reference.write_kv import write_kv


def decode_attention_parts(
    qkv: Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k [head_dim], eps
    cos: Tensor,  # [max_position, head_dim / 2] float32
    sin: Tensor,
    positions: Tensor,  # [rows]
    slots: Tensor,  # [rows]
    tables: Tensor,  # [rows, B]
    context_len: Tensor,  # [rows]: tokens, the new one included; 0 is padding, which writes nothing
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(parts [rows, splits, heads, head_dim], their log-sum-exp [rows, splits, heads] in units of log2), both float32"""
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    parts = torch.zeros(len(qkv), splits or 1, heads, head_dim, device=qkv.device)
    parts_lse = torch.full(parts.shape[:-1], -torch.inf, device=qkv.device)
    rows = context_len.nonzero().squeeze(1)
    q = write_kv(qkv[rows], norms, cos, sin, positions[rows].long(), slots[rows].long(), k_cache, v_cache)
    out, lse = parts.new_empty(q.shape), parts.new_empty(q.shape[:2])
    starts = torch.arange(len(rows) + 1)
    paged_attention(q, k_cache, v_cache, tables[rows], starts, context_len[rows], scale, out, window, lse)
    parts[rows, 0], parts_lse[rows, 0] = out, lse / math.log(2)
    return parts, parts_lse
