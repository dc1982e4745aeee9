"""Attention over a KV cache, in four plain steps: store new tokens, load a row's past, blank its tail, attend.

There is one `attend` and two loaders, paged and contiguous. Both hand it k and v of equal shape and strides, so with
equal bytes in the caches the results are equal bit for bit: paging can be proven invisible.

    loaded   [rows, length, kv_heads, head_dim]

             |<--- context --->|<- tail ->|       the tail is padding up to the longest row and may hold
    row 0    k k k k k k k k k k k k k k k        anything, NaN too: it is zeroed after loading, because
    row 1    k k k k k k k k k . . . . . .        0 * NaN is not 0
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def store(buffer: Tensor, values: Tensor, slots: Tensor) -> None:
    """Puts values [T, kv_heads, head_dim] at slots [T] of a buffer [blocks, block_size, kv_heads, head_dim]."""
    buffer.view(-1, *buffer.shape[2:]).index_copy_(0, slots, values)


def load_blocks(buffer: Tensor, blocks: Tensor, num_rows: int) -> Tensor:
    """The paged loader: whole blocks, in the order of the rows' tables; blocks is [rows * blocks_per_row]."""
    return buffer.index_select(0, blocks).view(num_rows, -1, *buffer.shape[2:])


def load_regions(buffer: Tensor, rows: Tensor, length: int) -> Tensor:
    """The contiguous loader: the first `length` tokens of each row's own region."""
    return buffer.narrow(1, 0, length).index_select(0, rows)


def zero_tail(loaded: Tensor, tail: Tensor) -> Tensor:
    """Zeroes, in place, the tokens listed in `tail` (row * length + position)."""
    if tail.numel():
        loaded.flatten(0, 1).index_fill_(0, tail, 0)
    return loaded


def causal_mask(context_len: Tensor, num_query: int, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """What to add to the scores, 0 or -inf. A row's queries are its last `num_query` positions."""
    key = torch.arange(length)
    query = context_len[:, None, None, None] - num_query + torch.arange(num_query)[:, None]  # [rows, 1, num_query, 1]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))  # [rows, 1, num_query, length]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """q [rows, num_query, heads, head_dim] over k, v [rows, length, kv_heads, head_dim]; the result is shaped like q."""
    rows, num_query, heads, head_dim = q.shape
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if num_query == 1:
        # Heads that share a kv head become its queries: each key is then read once, not once a head.
        grouped = q.view(rows, k.shape[1], -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return out.reshape(rows, 1, heads, head_dim)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)
