"""Attention over a KV cache on a CPU, in four steps: store new tokens, load a row's past, zero its tail, attend.

There is one `attend` and two loaders, paged and contiguous. Both pass it k and v of equal shape and strides. With equal bytes
in the caches, the results are equal bit for bit, so paging changes nothing. The references of the GPU kernels follow below.

    loaded   [rows, length, kv_heads, head_dim]

             |<--- context --->|<- tail ->|       the tail is padding up to the longest row and may hold
    row 0    k k k k k k k k k k k k k k k        anything, including NaN: it is zeroed after loading, because
    row 1    k k k k k k k k k . . . . . .        0 * NaN is not 0
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.reference.layer import norm_heads, rotate
from octavo.kernels.reference.merge import with_sinks
from octavo.kernels.reference.products import slow_here
from octavo.layout import SCORES
from octavo.step.share_words import DEPTH, IN_ALL, LINE, most_shares
from octavo.step.team_words import LEVELS, OWN, Teams


class Sloped(NamedTuple):
    """ALiBi: a score falls with the distance of its key. Each head has a slope, which is multiplied by `behind` and added to the score."""

    slopes: Tensor  # [heads] float32
    behind: Tensor  # [rows, num_query, length] float32: the key's position minus the query's


def store(buffer: Tensor, values: Tensor, slots: Tensor) -> None:
    """Writes values [T, kv_heads, head_dim] to slots [T] of a buffer [blocks, block_size, kv_heads, head_dim]."""
    buffer.view(-1, *buffer.shape[2:]).index_copy_(0, slots, values)


def load_blocks(buffer: Tensor, blocks: Tensor, num_rows: int) -> Tensor:
    """The paged loader: returns whole blocks, in the order of the rows' tables. blocks: [rows * blocks_per_row]"""
    return buffer.index_select(0, blocks).view(num_rows, -1, *buffer.shape[2:])


def load_regions(buffer: Tensor, rows: Tensor, length: int) -> Tensor:
    """The contiguous loader: returns the first `length` tokens of each row's own region."""
    return buffer.narrow(1, 0, length).index_select(0, rows)


def load_spans(buffer: Tensor, rows: Tensor, first: Tensor, length: int) -> Tensor:
    """Like `load_regions`, but starts at a given token in each row. After the end of a region, its last token is repeated."""
    places = first[:, None] + torch.arange(length)
    return buffer[rows[:, None].long(), places.clamp_(max=buffer.shape[1] - 1)]


def zero_tail(loaded: Tensor, tail: Tensor) -> Tensor:
    """Zeroes, in place, the tokens listed in `tail` (row * length + position)."""
    if tail.numel():
        loaded.flatten(0, 1).index_fill_(0, tail, 0)
    return loaded


def causal_mask(context_len: Tensor, num_query: int, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Returns the mask to add to the scores, 0 or -inf. A row's queries are its last `num_query` positions."""
    key = torch.arange(length)
    query = context_len[:, None, None, None] - num_query + torch.arange(num_query)[:, None]  # [rows, 1, num_query, 1]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))  # [rows, 1, num_query, length]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
    soft_cap: float | None = None, sinks: Tensor | None = None, sloped: Sloped | None = None,
) -> Tensor:  # fmt: skip
    """Returns attention of q [rows, num_query, heads, head_dim] over k, v [rows, length, kv_heads, head_dim], shaped like q.

    Values may be narrower than keys: they are so of a latent, and then the result is, too.

    `sinks` [heads]: a score per head that takes part in the softmax but has no value
    """
    if slow_here(q):
        mask = None if mask is None else mask.float()
        return attend(q.float(), k.float(), v.float(), mask, causal, scale, soft_cap, sinks, sloped).to(q.dtype)
    rows, num_query, heads, head_dim = q.shape
    if soft_cap is not None or sinks is not None or sloped is not None or v.shape[-1] < head_dim:
        assert not causal, "scores that are made one by one need a mask"
        return attend_by_scores(q, k, v, mask, scale, soft_cap, sinks, sloped)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if num_query == 1:
        # Heads that share a kv head become its queries, so that each key is read once per kv head.
        grouped = q.view(rows, k.shape[1], -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return out.reshape(rows, 1, heads, head_dim)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None, sloped: Sloped | None = None
) -> tuple[Tensor, Tensor]:
    """Returns attention over some of the keys, shaped like q, and its log-sum-exp [rows, num_query, heads]. All in float32.

    Every query must see at least one of these keys: otherwise its log-sum-exp is meaningless. mask: [rows, 1, num_query, length]
    """
    if soft_cap is not None or sloped is not None or v.shape[-1] < q.shape[-1]:
        lse = torch.empty(q.shape[:3])
        return attend_by_scores(q, k, v, mask, scale, soft_cap, sloped=sloped, lse=lse), lse
    num_query, group = q.shape[1], q.shape[2] // k.shape[2]
    grouped = q.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)  # [rows, kv_heads, num_query * group, head_dim]
    mask = None if mask is None else mask.repeat_interleave(group, 2)
    # This op is called by `scaled_dot_product_attention` on a CPU, which does not return the log-sum-exp.
    of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mixed, sums = of_cpu(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    parts = (each.unflatten(2, (num_query, group)).transpose(1, 2).flatten(2, 3) for each in (mixed, sums))
    return next(parts), next(parts)


def attend_by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None, sinks: Tensor | None = None,
    sloped: Sloped | None = None, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Like `attend`, but in float32 and for some queries at a time. lse: [rows, num_query, heads], receives log-sum-exps if given"""
    rows, num_query, heads = q.shape[:3]
    length, kv_heads = k.shape[1:3]
    keys, values = (one.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format) for one in (k, v))
    rests = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    at_once = max(SCORES // (rows * heads * length), 1)
    for first in range(0, num_query, at_once):
        queries = slice(first, first + at_once)
        grouped = q[:, queries].float().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [rows, kv_heads, group, n, head_dim]
        scores = torch.matmul(grouped.flatten(2, 3), keys.transpose(2, 3)).mul_(scale).unflatten(2, grouped.shape[2:4])
        if soft_cap is not None:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if sloped is not None:
            scores.addcmul_(sloped.slopes.view(kv_heads, -1, 1, 1), sloped.behind[:, None, None, queries])
        if mask is not None:
            scores += mask[:, :, None, queries]  # [rows, 1, 1, n, length]
        sums = with_sinks(torch.logsumexp(scores, -1, keepdim=True), rests)
        if lse is not None:
            lse[:, queries] = sums[..., 0].permute(0, 3, 1, 2).flatten(2)
        mixed = torch.matmul(scores.sub_(sums).exp_().flatten(2, 3), values).unflatten(2, grouped.shape[2:4])
        out[:, queries] = mixed.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
    return out


# -- references of GPU kernels


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
    sinks: Tensor | None = None,  # [heads]: a score that takes part in the softmax but has no value
    slopes: Tensor | None = None,  # [heads]: ALiBi, subtracted from a score for each token between query and key
) -> Tensor:
    """Fills and returns `out`, row by row and in float32. A row's queries are the last positions of its context.

    A row without context gets zeros, and -inf or the sink as its log-sum-exp.
    """
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
        rests = None if sinks is None else sinks.view(keys.shape[1], -1, 1, 1)
        sums = with_sinks(torch.logsumexp(scores, -1, keepdim=True), rests)  # [kv_heads, group, n, 1]
        mixed = torch.einsum("kgnl,lkd->nkgd", (scores - sums).exp(), values)
        out[start:end] = mixed.flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[start:end] = sums[..., 0].permute(2, 0, 1).flatten(1)
    return out


def write_kv(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k, [head_dim] or of all heads, eps
    cos: Tensor,  # [max_position, rotated / 2] float32, for the first dimensions of a head; without columns, nothing is rotated
    sin: Tensor,
    positions: Tensor,  # [T]
    slots: Tensor,  # [T]; below 0: the token is not stored
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
) -> Tensor:
    """Norms and rotates q and k in place and stores k and v in the cache. Returns q [T, heads, head_dim], a view of qkv."""
    kv_heads, head_dim = k_cache.shape[2:]
    parts = qkv.view(len(qkv), -1, head_dim)
    heads = parts.shape[1] - 2 * kv_heads
    q, k, v = parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
    normed_q, normed_k = q, k
    if norms is not None:
        normed_q, normed_k = norm_heads(q, norms[0], norms[2]), norm_heads(k, norms[1], norms[2])
    turns = cos[positions], sin[positions]  # [T, rotated / 2] each
    q.copy_(rotate(normed_q, *turns))
    k.copy_(rotate(normed_k, *turns))
    kept = slots >= 0
    slots = slots[kept]
    places = slots // k_cache.shape[1], slots % k_cache.shape[1]  # a cache may be strided, so it cannot be viewed by slots
    k_cache[places], v_cache[places] = k[kept], v[kept]
    return q


def decode_attention_parts(
    qkv: Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k [head_dim], eps
    cos: Tensor,  # [max_position, rotated / 2] float32, for the first dimensions of a head; without columns, nothing is rotated
    sin: Tensor,
    positions: Tensor,  # [rows]
    slots: Tensor,  # [rows]
    tables: Tensor,  # [rows, B]
    context_len: Tensor,  # tokens, including the new one; 0 is padding, which writes nothing
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes the cache, then attends. The first split has the whole result, the others are empty.

    Returns (parts [rows, splits, heads, head_dim], their log-sum-exp [rows, splits, heads] in units of log2), both float32.
    """
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    parts = torch.zeros(len(qkv), splits or 1, heads, head_dim, device=qkv.device)
    parts_lse = torch.full(parts.shape[:-1], -torch.inf, device=qkv.device)
    rows = context_len.nonzero().squeeze(1)
    q = write_kv(qkv[rows], norms, cos, sin, positions[rows].long(), slots[rows].long(), k_cache, v_cache)
    out, lse = parts.new_empty(q.shape), parts.new_empty(q.shape[:2])
    starts = torch.arange(len(rows) + 1)
    paged_attention(q, k_cache, v_cache, tables[rows], starts, context_len[rows], scale, out, window, lse, soft_cap, sinks)
    parts[rows, 0], parts_lse[rows, 0] = out, lse / math.log(2)
    return parts, parts_lse


def decode_shares(
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    window: int | None,
    kv_heads: int,
    tile: int,  # keys
    programs: int,  # programs that a GPU runs at once
    each: int,  # the most work items for each of them that rows are split into
    grain: int,  # tiles of a work item: there are more items as soon as each program would read twice as many tiles
    teams: Teams | None = None,
) -> Tensor:
    """Returns the split-KV work items of decode attention (`step/share_words.py`), [lines, LINE] int32. Unused fields are 0."""
    starts, contexts = query_start.tolist(), context_len.tolist()
    shares = torch.zeros(1 + most_shares(len(contexts), kv_heads, programs, each), LINE, dtype=torch.int32)
    entries = [(0, 0)] * len(contexts) if teams is None or not teams.lines[0, 0] else teams.entries.tolist()
    seen = {}  # row -> its tiles and its first key
    for row, end in enumerate(contexts):
        if starts[row + 1] - starts[row] == 1:
            first = max(entries[row][OWN], 0 if window is None else end - window)
            seen[row] = max(-(-(end - first) // tile), 1), first
    in_all = sum(tiles for tiles, _ in seen.values()) * kv_heads
    longest = -(-in_all // (programs * min(max(in_all // (programs * grain), 1), each)))
    line = 1
    for row, (tiles, first) in sorted(seen.items(), key=lambda one: -one[1][0]):
        size = -(-tiles // -(-tiles // longest))
        parts = -(-tiles // size)
        for part in range(parts):
            low = first + part * size * tile
            for kv_head in range(kv_heads):
                words = starts[row], row, kv_head, low, min(low + size * tile, contexts[row]), contexts[row], part, parts
                shares[line, : len(words)] = torch.tensor(words)
                shares[line, DEPTH] = entries[row][LEVELS]
                line += 1
    shares[0, IN_ALL] = line - 1
    return shares.to(query_start.device)


# -- keys and values in 8 bits: integers from -127 to 127, and one float32 scale for each head of a token
#
#     head    [ 0.5 -2.0  0.1  0.0 ]  ->  codes [ 32 -127  6  0 ],  scale 2.0 / 127
#
# The native kernels use the same rule, so that equal numbers give equal bits. A number that is not finite makes the scale not finite.


def to_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises values [T, kv_heads, head_dim]. Returns codes of that shape and scales [T, kv_heads]."""
    wide = values.float()
    largest = wide.abs().amax(-1)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)  # 127 / largest would be rounded twice
    codes = (wide * inverse.unsqueeze(-1)).round_().nan_to_num_(0, 0, 0)
    return codes.to(torch.int8), largest / 127


def from_codes(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float().mul_(scale.unsqueeze(-1))


# -- whole blocks


def copy_blocks(buffers: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copies block `source` onto block `target` for every pair, all reads before any write. buffers: each [num_blocks, ...]"""
    sources, targets = np.array(pairs).T
    for buffer in buffers:
        blocks = buffer.view(torch.uint8).numpy()  # torch would wake its threads for a few kilobytes, and wait for them on a busy machine
        blocks[targets] = blocks[sources]
