"""Attention over the keys that one of several ranks keeps. Ranks share out a sequence by blocks, one after the other:

    block_size 2, 2 ranks     position   0 1   2 3   4 5   6 7
                              rank        0     1     0     1
                              block      table[0]    table[1]        each rank keeps its half of it

    keys of rank 1            index 0 1 2 3  ->  positions 2 3 6 7

A rank's keys are in the order of their positions, so those before any position are the first of them. Scores are made for some queries
at a time: a long prompt over a long context never has all of them at once.
"""

import torch
from torch import Tensor

SCORES = 1 << 22  # at once


def partial_attention(
    q: Tensor,  # [T, heads, head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]: of this rank
    v_cache: Tensor,
    tables: Tensor,  # [R, B]: of blocks that cover `ranks` times as many tokens
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]: tokens, on whatever rank
    scale: float,
    rank: int,
    ranks: int,
    window: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,  # of k and v, [num_blocks, block_size, kv_heads], where these are codes
) -> tuple[Tensor, Tensor]:
    """Returns what each query makes of the keys that it sees here [T, heads, head_dim], and their log-sum-exp [T, heads]; both float32.

    A query that sees none has zeros, and -inf.
    """
    size, kv_heads = k_cache.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for row, (start, end) in enumerate(zip(query_start.tolist(), query_start[1:].tolist())):
        length = int(context_len[row])
        position = kept_positions(length, size, rank, ranks).to(q.device)  # [L]
        blocks = tables[row, : -(-len(position) // size)].long()
        keys, values = (cache[blocks].flatten(0, 1)[: len(position)].float() for cache in (k_cache, v_cache))  # [L, kv_heads, dim]
        if scales is not None:
            for codes, scale_of in zip((keys, values), scales):
                codes *= scale_of[blocks].flatten(0, 1)[: len(position), :, None]
        queries = max(SCORES // (q.shape[1] * max(len(position), 1)), 1)
        for first in range(start, end if len(position) else start, queries):
            last = min(first + queries, end)
            query = torch.arange(length - end + first, length - end + last, device=q.device)[:, None]  # [n, 1]
            hidden = position > query if window is None else (position > query) | (position <= query - window)  # [n, L]
            grouped = q[first:last].float().unflatten(1, (kv_heads, -1))  # [n, kv_heads, group, dim]
            scores = (torch.einsum("nkgd,lkd->kgnl", grouped, keys) * scale).masked_fill_(hidden, -torch.inf)
            sums = torch.logsumexp(scores, -1, keepdim=True)  # [kv_heads, group, n, 1]
            weights = scores.sub_(sums.clamp(min=torch.finfo().min)).exp_()  # no key at all: -inf less a number
            out[first:last] = torch.einsum("kgnl,lkd->nkgd", weights, values).flatten(1, 2)
            lse[first:last] = sums[..., 0].permute(2, 0, 1).flatten(1)
    return out, lse


def kept_positions(length: int, block_size: int, rank: int, ranks: int) -> Tensor:
    """Returns the positions below `length` that a rank keeps, in order."""
    position = torch.arange(length)
    return position[position // block_size % ranks == rank]
