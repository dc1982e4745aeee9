"""The memory layout of a block of the KV cache. The shape is the same in every layout; only the strides differ.

    shape   [num_blocks, block_size, kv_heads, head_dim]
    nhd     block | token | head | numbers      the heads of a token are contiguous, so it is written in one piece
    hnd     block | head | token | numbers      the tokens of a head are contiguous, so they are read in one piece

Code that reads or writes a cache by its shape need not know the layout. Kernels compute addresses themselves and need one number.
"""

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["nhd", "hnd"]


def empty_cache(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a cache in untouched memory. shape: [num_blocks, block_size, kv_heads, ...], in every layout"""
    return view_cache(layout, shape, dtype, torch.empty(shape, dtype=dtype, device=device))


def view_cache(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, memory: Tensor) -> Tensor:
    """Returns a cache of this shape over contiguous memory, which must have the same number of bytes."""
    numbers = memory.view(-1).view(dtype)
    if layout == "nhd":
        return numbers.view(shape)
    blocks, tokens, heads, *head = shape
    return numbers.view(blocks, heads, tokens, *head).transpose(1, 2)


def tokens_together(cache: Tensor) -> int:
    """Returns how many tokens of one head are contiguous: one, or all of a block."""
    if cache.is_contiguous():
        return 1
    assert cache.transpose(1, 2).is_contiguous(), f"a cache of strides {cache.stride()}"
    return cache.shape[1]
