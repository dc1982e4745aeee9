"""The twin of the paged attention kernel: row by row, in float32, with every score written out."""

import torch
from torch import Tensor

from octavo.kernels.reference.attention import causal_mask


def paged_attention(
    q: Tensor,  # [T, heads, head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]; contiguous: [num_rows, max_len, kv_heads, head_dim]
    v_cache: Tensor,
    tables: Tensor,  # [R, B]; contiguous: [R, 1], the region of each row
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    scale: float,
    out: Tensor,  # [T, heads, head_dim]
    window: int | None = None,
    lse: Tensor | None = None,  # [T, heads] float32
    soft_cap: float | None = None,
    sinks: Tensor | None = None,  # [heads]: a score that takes part in the softmax and has no value
    slopes: Tensor | None = None,  # [heads]: ALiBi, a score loses this for each token between query and key
) -> Tensor:
    """Fills and returns out. A row's queries are the last positions of its context; no context gives zeros and -inf, or the sink."""
    for row, (start, end) in enumerate(zip(query_start.tolist(), query_start[1:].tolist())):
        length = int(context_len[row])
        blocks = tables[row, : -(-length // k_cache.shape[1])].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length].float() for cache in (k_cache, v_cache))  # [length, kv_heads, dim]
        grouped = q[start:end].float().unflatten(1, (keys.shape[1], -1))  # [n, kv_heads, group, dim]
        mask = causal_mask(torch.tensor([length]), end - start, length, window, torch.float32)[0, 0].to(q.device)  # [n, length]
        scores = torch.einsum("nkgd,lkd->kgnl", grouped, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if slopes is not None:
            key, query = torch.arange(length, device=q.device), torch.arange(length - (end - start), length, device=q.device)
            scores += slopes.float().view(keys.shape[1], -1, 1, 1) * (key - query[:, None])
        scores += mask
        sums = torch.logsumexp(scores, -1, keepdim=True)  # [kv_heads, group, n, 1]
        if sinks is not None:
            sums = torch.logaddexp(sums, sinks.float().view(keys.shape[1], -1, 1, 1))
        mixed = torch.einsum("kgnl,lkd->nkgd", (scores - sums).exp(), values)
        out[start:end] = mixed.flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[start:end] = sums[..., 0].permute(2, 0, 1).flatten(1)
    return out
