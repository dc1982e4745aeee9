"""Decode context parallelism: ranks with the same k and v heads share the tokens of a sequence, block by block.

    rank 0    q of its heads -+                 +- attention over its keys: out, lse -+
                              +- q of all heads -+                                     +- weights, sum -> its own heads
    rank 1    q of its heads -+                 +- attention over its keys: out, lse -+

A block of the scheduler covers the tokens of a block on every rank of the group, so that one pool and one table serve all of them
(`kernels/reference/partial_attention.py` has a drawing). Each rank computes k and v of every token, and stores its own tokens.
Parts are weighted by their log-sum-exp, which gives the same result as attention over all keys. Prefill and decode are the same.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, QKNorm, Rope, split_heads
from octavo.attention.capabilities import Capabilities
from octavo.attention.cpu import keep, norm_and_rotate
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.attention.triton import norm_weights, region_places
from octavo.comm.comm import Comm
from octavo.kernels.ops import partial_attention, write_kv
from octavo.kernels.reference.merge import part_weights


@dataclass(frozen=True, slots=True)
class OwnPlaces:
    slots: Tensor  # [T]: in the cache of this rank; the null block if another rank stores the token
    tables: Tensor  # [R, B]


def own_slots(slots: Tensor, block_size: int, rank: int, ranks: int, elsewhere: int = 0) -> Tensor:
    """Converts slots in blocks that cover all ranks to slots in the cache of a rank. `block_size`: tokens that a rank stores

    `elsewhere`: the slot for tokens that another rank stores
    """
    block, offset = slots // (block_size * ranks), slots % (block_size * ranks)
    return torch.where(offset // block_size == rank, block * block_size + offset % block_size, elsewhere)


def over_context(backend: type[AttentionBackend], comm: Comm) -> type[AttentionBackend]:
    """Returns the backend of a rank if the ranks of `comm` share a context; `backend` itself if there is only one rank."""
    if comm.size == 1:
        return backend
    rank, ranks = comm.rank, comm.size

    class ContextBackend:
        capabilities: ClassVar[Capabilities] = backend.capabilities.over_context()

        def __init__(self, spec: AttentionSpec) -> None:
            self.spec = spec
            self.few_rows = 0

        @staticmethod
        def prepare(batch: ForwardBatch) -> OwnPlaces:
            return OwnPlaces(own_slots(batch.slots, batch.block_size // ranks, rank, ranks), batch.tables)

        def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
            places = batch.rope_positions, batch.attention.slots
            if cache["k"].dtype != qkv.dtype:  # only on a CPU
                q, k, v = split_heads(qkv, self.spec)
                q, k = norm_and_rotate(q, k, norms, rope, places[0])
                keep(cache, k, v, places[1])
                return q
            return write_kv(qkv, norm_weights(norms), rope.cos, rope.sin, *places, cache["k"], cache["v"])

        def attend(
            self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
        ) -> Tensor:
            heads = self.spec.num_heads
            of_all = comm.all_gather(q.flatten(1)).unflatten(1, (ranks * heads, -1))  # [T, heads of the group, head_dim]
            part, lse = partial_attention(
                of_all, cache["k"], cache["v"], batch.attention.tables, batch.query_start, batch.context_len, self.spec.scale, rank, ranks,
                self.spec.window, scales=(cache["k_scale"], cache["v_scale"]) if "k_scale" in cache else None,
            )  # fmt: skip
            weights = part_weights(comm.all_gather(lse.unsqueeze(-1)))  # [T, heads of the group, ranks]
            merged = comm.all_reduce(part.mul_(weights[..., rank, None]))
            return out.copy_(merged[:, rank * heads : (rank + 1) * heads])

    return ContextBackend


def over_regions(backend: type[AttentionBackend], comm: Comm) -> type[AttentionBackend]:
    """Returns the contiguous counterpart of a backend from `over_context`, for verification: row r owns region r of a contiguous cache.

    A region holds the tokens that this rank stores, in order. The kernels see it as consecutive blocks. The last region is for padding and
    the tokens of other ranks.
    """
    rank, ranks = comm.rank, comm.size

    class ContextRegions(backend):  # type: ignore[valid-type, misc]
        capabilities: ClassVar[Capabilities] = replace(backend.capabilities, name="contiguous", paged=False)

        @staticmethod
        def prepare(batch: ForwardBatch) -> OwnPlaces:
            """Computes everything on the device, without synchronising."""
            (count, length), size = batch.caches[0]["k"].shape[:2], batch.block_size // ranks
            blocks = torch.arange(batch.tables.shape[1], device=batch.tables.device, dtype=batch.tables.dtype)
            regions, of_tokens = region_places(batch, count)
            slots = of_tokens.long() * length * ranks + batch.cache_index  # in regions that cover all ranks
            return OwnPlaces(own_slots(slots, size, rank, ranks, (count - 1) * length), regions[:, None] * (length // size) + blocks)

        def attend(
            self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
        ) -> Tensor:
            size = batch.block_size // ranks
            blocks = {name: buffer.view(-1, size, *buffer.shape[2:]) for name, buffer in cache.items()}
            attended: Tensor = super().attend(q, blocks, batch, out)
            return attended

    return ContextRegions
