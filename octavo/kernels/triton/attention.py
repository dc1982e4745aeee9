"""Attention over a KV cache: rows of one query go to the decode kernel, rows of more to the prefill kernel.

    paged         cache [num_blocks, block_size, kv_heads, head_dim], tables [R, B]: the blocks of each row
    contiguous    cache [num_rows, max_len, kv_heads, head_dim], tables [R, 1]: the region of each row

Both run the same tiles in the same order, so with equal bytes in the caches the results are equal bit for bit. Nothing here
waits for the GPU: `max_query` and `max_context` are bounds the caller knows, and rows are told apart on the device. A row's
context ends with its queries; slots past it are never read. A row without context yields zeros, its log-sum-exp is -inf.
"""

import torch
import triton
from torch import Tensor

from octavo.kernels.triton.attention_decode import decode, merge
from octavo.kernels.triton.attention_parts import LOG2_E
from octavo.kernels.triton.attention_prefill import prefill
from octavo.kernels.triton.attention_tiles import MIN_DOT, Tiles, decode_splits, decode_tiles, prefill_tiles


def paged_attention(
    q: Tensor,  # [T, heads, head_dim]; tokens may lie apart, as q does inside qkv
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,  # int32 or int64
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    scale: float,
    out: Tensor,  # [T, heads, head_dim]
    max_query: int,
    max_context: int,
    window: int | None = None,
    lse: Tensor | None = None,  # [T, heads] float32, natural log
    paged: bool = True,
    tiles: Tiles | None = None,  # of the kernel that max_query calls for
    splits: int | None = None,
) -> Tensor:
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    size = k_cache.shape[1]
    _check(q, k_cache, v_cache, tables, out, paged)
    group_tile = triton.next_power_of_2(heads // kv_heads)
    rows = len(context_len)
    shared = {
        "Q_STRIDE": q.stride(0), "HEADS": heads, "KV_HEADS": kv_heads, "DIM": head_dim,
        "BLOCK_SIZE": size if paged else 1, "PAGED": paged, "WINDOWED": window is not None, "WITH_LSE": lse is not None,
    }  # fmt: skip
    tensors = (q, k_cache, v_cache, tables, query_start, context_len, out, out if lse is None else lse)
    numbers = (tables.stride(0), size, window or 0)
    if max_query > 1:
        chosen = tiles or prefill_tiles(q.dtype, head_dim)
        tokens = max(chosen.queries // group_tile, 1)
        prefill[(len(q) // tokens + rows, kv_heads)](
            *tensors, scale * LOG2_E, rows, *numbers, **shared,
            TOKENS=tokens, GROUP_TILE=max(group_tile, MIN_DOT // tokens),
            TILE=chosen.keys, STAGES=chosen.stages, num_warps=chosen.warps,
        )  # fmt: skip
        tiles = None
    chosen = tiles or decode_tiles(q.dtype, max_context)
    splits = splits or decode_splits(rows, kv_heads, min(max_context, window or max_context))
    parts = out if splits == 1 else torch.empty(rows, splits, heads, head_dim, dtype=torch.float32, device=q.device)
    parts_lse = out if splits == 1 else torch.empty(rows, splits, heads, dtype=torch.float32, device=q.device)
    decode[(rows, kv_heads, splits)](
        *tensors, parts, parts_lse, scale * LOG2_E, *numbers, **shared,
        GROUP_TILE=max(group_tile, MIN_DOT), SPLITS=splits, TILE=chosen.keys, STAGES=chosen.stages, num_warps=chosen.warps,
    )  # fmt: skip
    if splits > 1:
        merge[(rows, heads)](
            parts, parts_lse, query_start, out, out if lse is None else lse,
            HEADS=heads, DIM=head_dim, WITH_LSE=lse is not None, SPLITS=splits, num_warps=4,
        )  # fmt: skip
    return out


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, out: Tensor, paged: bool) -> None:
    size, kv_heads, head_dim = k_cache.shape[1:]
    assert head_dim == triton.next_power_of_2(head_dim) and 16 <= head_dim <= 256, f"head_dim {head_dim}"
    assert not paged or (size == triton.next_power_of_2(size) and size <= 256), f"block size {size}"
    assert q.shape[1] % kv_heads == 0, f"{q.shape[1]} heads over {kv_heads} KV heads"
    assert q.stride()[1:] == (head_dim, 1) and tables.stride(1) == 1 and out.is_contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
