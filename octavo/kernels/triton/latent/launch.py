"""Latent attention on a GPU: the tiles of a step, and its kernels. Nothing here waits for the GPU."""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.triton.attention.common import LOG2_E
from octavo.kernels.triton.attention.decode_shares import decode_shares
from octavo.kernels.triton.attention.tiles import multiprocessors
from octavo.kernels.triton.latent.attention import latent_decode, latent_prefill
from octavo.kernels.triton.latent.tiles import (
    MOST_RANK,
    MOST_ROTARY,
    LatentTiles,
    decode_tiles,
    head_groups,
    padded,
    prefill_tiles,
)
from octavo.kernels.triton.pdl import use_pdl
from octavo.kernels.triton.target import capability
from octavo.step.share_words import DecodeShares, most_parts, most_shares


def latent_attention(
    q: Tensor,  # [T, heads, rank + rotary], contiguous
    cache: Tensor,  # [num_blocks, block_size, 1, rank + rotary]; not paged: [num_rows, max_len, 1, rank + rotary]
    tables: Tensor,  # [R, B]; not paged: [R, 1], the region of each row
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    scale: float,
    out: Tensor,  # [T, heads, rank]
    max_query: int,
    shares: DecodeShares | None = None,  # from `latent_shares` for the same rows and heads
    paged: bool = True,
    tiles: LatentTiles | None = None,  # of the kernel selected by max_query
) -> Tensor:
    """Fills and returns `out`: the weighted latents of each row's queries, the last of its context."""
    check(q, cache, tables, out, paged)
    if not len(q):
        return out
    heads, shared = q.shape[1], shape_of(q, cache, out, paged)
    numbers = scale * LOG2_E, tables.stride(0), cache.shape[1]
    if max_query > 1:
        _prefill((q, cache, tables, query_start, context_len, out), numbers, shared, tiles or prefill_tiles(q.dtype, capability()))
        tiles = None
    chosen = tiles or decode_tiles(q.dtype, heads, capability())
    if shares is None:
        shares = latent_shares(query_start, context_len, cache, heads, chosen)
    _decode((q, cache, tables, shares.lines, out), numbers, shared, len(context_len), chosen)
    return out


def shape_of(q: Tensor, cache: Tensor, out: Tensor, paged: bool) -> dict[str, Any]:
    """Returns the constants that all kernels have in common."""
    (_, heads, dim), rank = q.shape, out.shape[2]
    return {
        "HEADS": heads, "RANK": rank, "ROTARY": dim - rank, "RANK_TILE": padded(rank), "ROTARY_TILE": padded(dim - rank),
        "BLOCK_SIZE": cache.shape[1] if paged else 1, "PAGED": paged,
    }  # fmt: skip


def latent_shares(query_start: Tensor, context_len: Tensor, cache: Tensor, heads: int, tiles: LatentTiles | None = None) -> DecodeShares:
    """Divides the decode work of this step into work items (`step/share_words.py`), with groups of heads in place of KV heads."""
    chosen = tiles or decode_tiles(cache.dtype, heads, capability())
    programs = chosen.programs * multiprocessors(cache.device)
    return decode_shares(
        query_start, context_len, None, head_groups(heads, chosen.lines), chosen.keys, programs, chosen.shares, chosen.grain
    )  # fmt: skip


def _prefill(tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], shared: dict[str, Any], tiles: LatentTiles) -> None:
    tokens, rows, groups = len(tensors[0]), len(tensors[4]), head_groups(shared["HEADS"], tiles.lines)
    latent_prefill[(tokens // (tiles.lines * groups // shared["HEADS"]) + rows, groups)](
        *tensors, *numbers, rows, **shared, GROUPS=groups, LINES=tiles.lines, TILE=tiles.keys, STAGES=tiles.stages, num_warps=tiles.warps
    )


def _decode(tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], shared: dict[str, Any], rows: int, tiles: LatentTiles) -> None:
    q, shares = tensors[0], tensors[3]
    groups, programs = head_groups(shared["HEADS"], tiles.lines), tiles.programs * multiprocessors(q.device)
    group, most = shared["HEADS"] // groups, most_shares(rows, groups, programs, tiles.shares)
    assert len(shares) == most + 1, f"{len(shares)} lines for {programs} programs, {rows} rows"
    left = torch.empty(most_parts(programs, tiles.shares), group, shared["RANK"], dtype=torch.float32, device=q.device)
    sums = torch.empty(left.shape[:2], dtype=torch.float32, device=q.device)
    pdl = use_pdl()
    latent_decode[(most,)](
        *tensors, left, sums, *numbers, **shared, GROUPS=groups, LINES=tiles.lines, MERGED=tiles.merged,
        TILE=tiles.keys, STAGES=tiles.stages, PDL=pdl, num_warps=tiles.warps, launch_pdl=pdl,
    )  # fmt: skip


def check(q: Tensor, cache: Tensor, tables: Tensor, out: Tensor, paged: bool) -> None:
    (tokens, heads, dim), (size, kv_heads) = q.shape, cache.shape[1:3]
    rank = out.shape[2]
    assert rank <= MOST_RANK and 0 < dim - rank <= MOST_ROTARY, f"latents of {rank}, rotary keys of {dim - rank}"
    assert kv_heads == 1 and cache.shape[3] == dim and cache.is_contiguous(), f"a cache of {tuple(cache.shape)}"
    assert not paged or (size & (size - 1) == 0 and size <= 256), f"block size {size}"
    assert out.shape == (tokens, heads, rank) and q.is_contiguous() and out.is_contiguous() and tables.stride(1) == 1
