"""Attention over a KV cache: rows of one query go to the decode kernel, rows of more to the prefill kernel.

    paged         cache [num_blocks, block_size, kv_heads, head_dim], tables [R, B]: the blocks of each row
    contiguous    cache [num_rows, max_len, kv_heads, head_dim], tables [R, 1]: the region of each row

Both run the same tiles in the same order, so with equal bytes in the caches the results are equal bit for bit. Nothing here
waits for the GPU: `max_query` and `max_context` are bounds the caller knows, and rows are told apart on the device. A row's
context ends with its queries; slots past it are never read. A row without context yields zeros, its log-sum-exp is -inf, or
its sink's score.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.attention_decode import decode, merge
from octavo.kernels.triton.attention_hopper import prefill_divided
from octavo.kernels.triton.attention_parts import LOG2_E
from octavo.kernels.triton.attention_prefill import prefill
from octavo.kernels.triton.attention_tiles import MIN_DOT, TOKENS_PER_SPLIT, Tiles, decode_splits, decode_tiles, prefill_tiles

Pair = tuple[Tensor, Tensor]
Given = tuple[Any, ...]  # arguments both kernels begin with


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
    fresh: Pair | None = None,  # k and v of q's tokens, as write_kv leaves them in qkv [T, kv_heads, head_dim]: read instead of the cache
    soft_cap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
    slopes: Tensor | None = None,  # [heads] float32: ALiBi
) -> Tensor:
    heads, head_dim = q.shape[1:]
    size, kv_heads = k_cache.shape[1:3]
    _check(q, k_cache, v_cache, tables, out, paged, scale)
    if not len(q):
        return out
    common = {
        "HEADS": heads, "DIM": head_dim, "DIM_TILE": triton.next_power_of_2(head_dim),
        "WINDOWED": window is not None, "WITH_SINKS": sinks is not None, "WITH_LSE": lse is not None,
    }  # fmt: skip
    capped, sloped = soft_cap is not None, slopes is not None
    shared = common | {
        "Q_STRIDE": q.stride(0), "KV_HEADS": kv_heads, "BLOCK_SIZE": size if paged else 1, "PAGED": paged,
        "CAPPED": capped, "SLOPED": sloped,
    }  # fmt: skip
    tensors = q, k_cache, v_cache, tables, query_start, context_len, out, lse, sinks, slopes
    numbers = scale, LOG2_E * (1.0 if capped or sloped else scale), soft_cap or 0.0, tables.stride(0), size, window or 0
    if max_query > 1:
        plain = window is None and sinks is None and not capped and not sloped
        tiles = tiles or prefill_tiles(q.dtype, head_dim, plain)
        if tiles.divided and plain and _describable(q):
            prefill_divided(*tensors[:8], fresh, numbers, shared, tiles)
        else:
            _prefill(tensors, numbers, shared, fresh, tiles)
        tiles = None
    splits = splits or decode_splits(len(context_len), kv_heads, min(max_context, window or max_context))
    _decode(tensors, numbers, shared, common, tiles or decode_tiles(q.dtype, head_dim), splits)
    return out


def _prefill(tensors: Given, numbers: Given, shared: dict[str, Any], fresh: Pair | None, tiles: Tiles) -> None:
    q, context_len = tensors[0], tensors[5]
    heads, kv_heads = shared["HEADS"], shared["KV_HEADS"]
    lines = max(tiles.queries, triton.next_power_of_2(heads // kv_heads))
    described = tiles.described and fresh is not None and _describable(q)
    new: tuple[Any, Any] = fresh or (None, None)
    descriptors = [_describe(one, tiles.keys) if described else None for one in new]
    prefill[(len(q) // (lines * kv_heads // heads) + len(context_len), kv_heads)](
        *tensors, *new, *descriptors, *numbers, len(context_len), **shared, LINES=lines, NEW_STRIDE=new[0].stride(0) if fresh else 0,
        WITH_NEW=fresh is not None, DESCRIBED=described, TILE=tiles.keys, STAGES=tiles.stages, LAGGING=tiles.lagging,
        JOINED=tiles.joined, num_warps=tiles.warps,
    )  # fmt: skip


def _decode(tensors: Given, numbers: Given, shared: dict[str, Any], common: dict[str, Any], tiles: Tiles, splits: int) -> None:
    q, (query_start, context_len, out, lse, sinks) = tensors[0], tensors[4:9]
    heads, kv_heads, head_dim, rows = shared["HEADS"], shared["KV_HEADS"], shared["DIM"], len(context_len)
    parts = sums = None
    if splits > 1:
        parts = torch.empty(rows, splits, heads, head_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(rows, splits, heads, dtype=torch.float32, device=q.device)
    cut = {"SPLITS": splits, "LEAST": max(TOKENS_PER_SPLIT, tiles.keys), "TILE": tiles.keys}
    group_tile = max(triton.next_power_of_2(heads // kv_heads), MIN_DOT)
    decode[(rows, kv_heads, splits)](
        *tensors, parts, sums, *numbers, **shared, **cut, GROUP_TILE=group_tile, STAGES=tiles.stages, num_warps=tiles.warps
    )
    if splits > 1:
        merge[(rows, heads)](parts, sums, query_start, context_len, out, lse, sinks, numbers[-1], **common, **cut, num_warps=4)


def _describable(q: Tensor) -> bool:
    """Whether tensor descriptors serve: they copy whole tiles of powers of two, on Hopper and later."""
    return q.dtype.itemsize == 2 and q.shape[2] == triton.next_power_of_2(q.shape[2]) and (not q.is_cuda or _has_copy_engine(q.device))


@cache
def _has_copy_engine(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def _describe(new: Tensor, keys: int) -> TensorDescriptor:
    """Tiles of one head and so many tokens of [T, kv_heads, head_dim]."""
    return TensorDescriptor(new, [len(new), new.shape[1] * new.shape[2]], [new.stride(0), 1], [keys, new.shape[2]])


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, out: Tensor, paged: bool, scale: float) -> None:
    size, kv_heads, head_dim = k_cache.shape[1:]
    assert head_dim % 16 == 0 and head_dim <= 256, f"head_dim {head_dim}"
    assert not paged or (size == triton.next_power_of_2(size) and size <= 256), f"block size {size}"
    assert q.shape[1] % kv_heads == 0, f"{q.shape[1]} heads over {kv_heads} KV heads"
    assert q.stride()[1:] == (head_dim, 1) and tables.stride(1) == 1 and out.is_contiguous() and scale > 0
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
