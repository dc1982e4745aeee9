"""Attention over the keys stored on one of several ranks. The ranks share a sequence block by block, in turn:

    block_size 2, 2 ranks     position   0 1   2 3   4 5   6 7
                              rank        0     1     0     1
                              block      table[0]    table[1]        each rank stores its half of it

    keys of rank 1            index 0 1 2 3  ->  positions 2 3 6 7

A rank's keys are in the order of their positions, so the keys before any position are a prefix of them. Scores are computed for some
queries at a time, so that a long prompt over a long context does not need all of them at once.
"""

import torch
from torch import Tensor

from octavo.kernels.reference.merge import exponentials
from octavo.layout import SCORES


def partial_attention(
    q: Tensor,  # [T, heads, head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]: on this rank
    v_cache: Tensor,
    tables: Tensor,  # [R, B]: of blocks that cover `ranks` times as many tokens
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]: tokens, on all ranks
    scale: float,
    rank: int,
    ranks: int,
    window: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,  # of k and v, [num_blocks, block_size, kv_heads], if these are quantised
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns attention of each query over the keys that it sees here [T, heads, head_dim], and the log-sum-exp [T, heads]; both float32.

    For a query that sees none, these are zeros and -inf.
    """
    size = k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    k_scale, v_scale = scales or (None, None)
    for row, (start, end) in enumerate(zip(query_start.tolist(), query_start[1:].tolist())):
        length = int(context_len[row])
        position = kept_positions(length, size, rank, ranks).to(q.device)  # [L]
        if start == end or not len(position):
            continue
        blocks = tables[row, : -(-len(position) // size)].long()
        keys, values = (_by_head(*one, blocks, len(position)) for one in ((k_cache, k_scale), (v_cache, v_scale)))
        at_once = max(SCORES // (q.shape[1] * len(position)), 1)
        for first in range(start, end, at_once):
            last = min(first + at_once, end)
            query = torch.arange(length - end + first, length - end + last, device=q.device)[:, None]  # [n, 1]
            hidden = position > query if window is None else (position > query) | (position <= query - window)  # [n, L]
            out[first:last], lse[first:last] = _attend(q[first:last].float() * scale, keys, values, hidden, soft_cap)
    return out, lse


def _by_head(cache: Tensor, scale: Tensor | None, blocks: Tensor, count: int) -> Tensor:
    """Returns the first `count` tokens of these blocks in float32, [kv_heads, L, head_dim]."""
    loaded = cache[blocks].flatten(0, 1)[:count].transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    return loaded if scale is None else loaded.mul_(scale[blocks].flatten(0, 1)[:count].T.unsqueeze(-1))


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor]:
    """Returns the attention [n, heads, head_dim] of queries, and its log-sum-exp [n, heads]. Uses only one array of scores."""
    grouped = q.unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)  # [kv_heads, group, n, head_dim]
    scores = torch.matmul(grouped.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, grouped.shape[1:3])  # [kv_heads, group, n, L]
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.masked_fill_(hidden, -torch.inf)
    weights, total, lse = exponentials(scores)
    mixed = torch.matmul(weights.flatten(1, 2), values).unflatten(1, grouped.shape[1:3]) / total.clamp(min=1)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2), lse[..., 0].permute(2, 0, 1).flatten(1)


def kept_positions(length: int, block_size: int, rank: int, ranks: int) -> Tensor:
    """Returns the positions below `length` that are stored on a rank, in order."""
    position = torch.arange(length)
    return position[position // block_size % ranks == rank]
