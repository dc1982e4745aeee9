"""Attention without paging: the reference that the paged backend is compared with.

    cache   [num_rows, max_len, kv_heads, head_dim]      row r owns region r;  slot = r * max_len + index

A token's slot follows from its row and position alone, so no block table can be wrong here. After loading, it calls the
same functions as the paged backend.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from octavo.attention.backend import QKNorm, Rope, split_heads
from octavo.attention.capabilities import CONTIGUOUS, Capabilities
from octavo.attention.cpu import attend_group, keep, norm_and_rotate, recall, write_absorbed
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.row_groups import RowGroup
from octavo.attention.shared_rows import KeyNode, SharedRows, attend_shared, split_rows
from octavo.attention.spec import AttentionSpec
from octavo.kernels.reference.attention import load_regions, load_spans


@dataclass(frozen=True, slots=True)
class Prepared:
    token_rows: Tensor  # [T] int64: the row of each token
    groups: list[RowGroup]
    shared: SharedRows | None


class ContiguousBackend:
    capabilities: ClassVar[Capabilities] = CONTIGUOUS

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.few_rows = 0

    @staticmethod
    def prepare(batch: ForwardBatch) -> Prepared:
        return Prepared(batch.rows.long().repeat_interleave(batch.query_start.diff()), *split_rows(batch))

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
        q, k, v = split_heads(qkv, self.spec)
        q, k = norm_and_rotate(q, k, norms, rope, batch.rope_positions)
        max_len = cache["k"].shape[1]
        slots = batch.attention.token_rows.long() * max_len + batch.cache_index  # torch indexes buffers by int64
        keep(cache, k, v, slots)
        return q

    def write_latent(
        self, q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], rope: Rope, cache: Cache, batch: ForwardBatch
    ) -> Tensor:
        return write_absorbed(self, q, kv, k_up, norm, rope, cache, batch)

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        shared = batch.attention.shared
        for group in batch.attention.groups:
            rows, length = batch.rows[group.index], group.num_blocks * batch.block_size
            k, v = recall(cache, partial(load_regions, rows=rows, length=length), q.dtype, self.spec.value_dim)
            attend_group(q, k, v, group.tail, group, self.spec, out, sinks, slopes)

        def keys(index: Tensor, first: Tensor, length: int) -> tuple[Tensor, Tensor]:
            load = partial(load_spans, rows=batch.rows[index], first=first, length=length)
            return recall(cache, load, torch.float32, self.spec.value_dim)

        def keys_of_node(node: KeyNode) -> tuple[Tensor, Tensor]:
            return keys(torch.tensor([node.row]), torch.tensor([node.begin]), node.end - node.begin)

        def keys_of_rest(group: RowGroup) -> tuple[tuple[Tensor, Tensor], Tensor]:
            return keys(group.index, group.first, group.num_blocks * batch.block_size), group.tail

        if shared is not None:
            attend_shared(q, shared, keys_of_node, keys_of_rest, self.spec, out, sinks, slopes)
        return out
