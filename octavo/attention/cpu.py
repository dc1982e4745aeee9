"""Paged attention on a CPU. A sequence's keys and values are in arbitrary blocks of the pool; its table lists them.

    block_size 4, a row of 10 tokens

    table  [ 7 | 2 | 5 ]                     pool     block 0   the null block: padding, always zero
             |   |   |                                block 1   (another row's)
             |   |   +------ tokens 8..9  ->          block 5   t8 t9  .  .    the last block is part filled
             |   +---------- tokens 4..7  ->          block 2   t4 t5 t6 t7
             +-------------- tokens 0..3  ->          block 7   t0 t1 t2 t3

    slot of token 9 = block * block_size + offset = table[9 // 4] * 4 + 9 % 4 = 5 * 4 + 1 = 21

`write` stores each new token in its slot. `attend` gathers whole blocks through the table, so that a row's tokens are in order
again; the rest is ordinary attention. A block never moves. If two tables contain the same block, it is part of a shared prefix.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, QKNorm, Rope, split_heads
from octavo.attention.capabilities import CPU, Capabilities
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.row_groups import RowGroup
from octavo.attention.shared_rows import SharedRows, attend_shared, split_rows
from octavo.attention.spec import AttentionSpec
from octavo.kernels.reference.attention import Sloped, attend, from_codes, load_blocks, store, to_codes, zero_tail
from octavo.kernels.reference.latent import absorb
from octavo.kernels.reference.layer import norm_heads, rotate


class CpuBackend:
    capabilities: ClassVar[Capabilities] = CPU

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.few_rows = 0

    @staticmethod
    def prepare(batch: ForwardBatch) -> tuple[list[RowGroup], SharedRows | None]:
        return split_rows(batch)

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
        q, k, v = split_heads(qkv, self.spec)
        q, k = norm_and_rotate(q, k, norms, rope, batch.rope_positions)
        keep(cache, k, v, batch.slots)
        return q

    def write_latent(
        self, q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], rope: Rope, cache: Cache, batch: ForwardBatch
    ) -> Tensor:
        return write_absorbed(self, q, kv, k_up, norm, rope, cache, batch)

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        groups, shared = batch.attention

        def keys(blocks: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return recall(cache, partial(load_blocks, blocks=blocks, num_rows=rows), dtype, self.spec.value_dim)

        def keys_of_rest(group: RowGroup) -> tuple[tuple[Tensor, Tensor], Tensor]:
            return keys(group.blocks, len(group.index), torch.float32), group.edge

        for group in groups:
            attend_group(q, *keys(group.blocks, len(group.index), q.dtype), group.edge, group, self.spec, out, sinks, slopes)
        if shared is not None:
            attend_shared(q, shared, lambda node: keys(node.blocks, 1, torch.float32), keys_of_rest, self.spec, out, sinks, slopes)
        return out


def write_absorbed(
    backend: AttentionBackend, q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], rope: Rope, cache: Cache,
    batch: ForwardBatch,
) -> Tensor:  # fmt: skip
    """Implements `LatentBackend.write_latent` by `write`, with q and the key side by side."""
    cos, sin = (table.index_select(0, batch.rope_positions) for table in (rope.cos, rope.sin))
    return backend.write(absorb(q, kv, k_up, norm, cos, sin), None, Rope(rope.cos[:, :0], rope.sin[:, :0]), cache, batch)


def norm_and_rotate(q: Tensor, k: Tensor, norms: QKNorm | None, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    if norms is not None:
        q = norm_heads(q, norms.q_weight, norms.eps)
        k = norm_heads(k, norms.k_weight, norms.eps)
    cos, sin = rope.cos.index_select(0, positions), rope.sin.index_select(0, positions)  # [T, rotated / 2]
    return rotate(q, cos, sin), rotate(k, cos, sin)


def keep(cache: Cache, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Stores k and v in the cache, rounded to its dtype. With a latent, there is only k."""
    for name, values in (("k", k), ("v", v)):
        buffer = cache.get(name)
        if buffer is None:
            continue
        if buffer.dtype == torch.int8:
            values, scale = to_codes(values)
            store(cache[f"{name}_scale"], scale, slots)
        store(buffer, values.to(buffer.dtype), slots)


def recall(cache: Cache, load: Callable[[Tensor], Tensor], dtype: torch.dtype, value_dim: int) -> tuple[Tensor, Tensor]:
    """Returns k and v from the cache, in `dtype`. `load` gathers tokens of a buffer. `value_dim`: if v is the first numbers of k"""

    def loaded(name: str) -> Tensor:
        values = load(cache[name])
        if values.dtype == torch.int8:
            values = from_codes(values, load(cache[f"{name}_scale"]))
        return values.to(dtype)

    k = loaded("k")
    return k, loaded("v") if "v" in cache else k[..., :value_dim]


def attend_group(
    q: Tensor, k: Tensor, v: Tensor, tail: Tensor, group: RowGroup, spec: AttentionSpec, out: Tensor, sinks: Tensor | None,
    slopes: Tensor | None,
) -> None:  # fmt: skip
    """Computes attention of a group's queries over its k and v [rows, tokens, kv_heads, head_dim], and fills their part of out.

    `tail` lists positions in k and v that these rows never wrote and that may not be zero.
    """
    queries = q.index_select(0, group.tokens).view(-1, group.num_query, *q.shape[1:])  # [rows, num_query, heads, head_dim]
    k = zero_tail(k, tail)[:, : group.length]
    v = zero_tail(v, tail)[:, : group.length]
    sloped = None if slopes is None else Sloped(slopes, group.behind())
    mask, causal = group.mask(spec.window, q.dtype, by_scores=spec.materialises_scores)
    mixed = attend(queries, k, v, mask, causal, spec.scale, spec.soft_cap, sinks, sloped)
    out.index_copy_(0, group.tokens, mixed.flatten(0, 1))
