"""Decode context parallel: ranks that have the same heads of k and v share out the tokens of a sequence, block by block.

    rank 0    q of its heads -+                 +- attention over its keys: out, lse -+
                              +- q of all heads -+                                     +- weights, sum -> its own heads
    rank 1    q of its heads -+                 +- attention over its keys: out, lse -+

A block of the scheduler covers the tokens of a block on every rank of the group, so that one pool and one table serve all of them
(`kernels/reference/partial_attention.py` has the drawing). Each rank computes k and v of every token, and stores those of its own.
Parts are weighed by their log-sum-exp, which gives what attention over all keys gives. Prefill and decode are the same.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.attention.backend import BEFORE_THE_CACHE, AttentionBackend, QKNorm, Rope, refuse_unsupported, split_heads
from octavo.attention.cpu import keep, norm_and_rotate
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.attention.triton import norm_weights, region_places
from octavo.errors import ConfigError
from octavo.kernels.ops import partial_attention, write_kv
from octavo.layers.comm import Comm

KERNELS = ("cpu", "triton")  # backends whose place this one takes
LOWEST = -1e30  # finite, and below any score


@dataclass(frozen=True, slots=True)
class OwnPlaces:
    slots: Tensor  # [T]: in the cache of this rank; the null block, where another rank keeps the token
    tables: Tensor  # [R, B]


def own_slots(slots: Tensor, block_size: int, rank: int, ranks: int, elsewhere: int = 0) -> Tensor:
    """Returns places in the cache of a rank, out of places in blocks that cover all ranks. `block_size`: tokens that a rank keeps

    `elsewhere`: the place of a token that another rank keeps
    """
    block, offset = slots // (block_size * ranks), slots % (block_size * ranks)
    return torch.where(offset // block_size == rank, block * block_size + offset % block_size, elsewhere)


def weights_of_ranks(lse: Tensor) -> Tensor:
    """Returns how much the part of each rank counts, of log-sum-exps [..., ranks]. Where no rank has seen a key, none counts."""
    weights = (lse - lse.amax(-1, keepdim=True).clamp(min=LOWEST)).exp()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1)  # the largest is 1


def over_context(backend: type[AttentionBackend], comm: Comm) -> type[AttentionBackend]:
    """Returns the backend with which a rank attends, where the ranks of `comm` share a context; `backend` itself, if there is one rank."""
    if comm.size == 1:
        return backend
    if backend.name not in KERNELS:
        raise ConfigError(
            f"attention_backend is {backend.name}, which cannot attend to a part of a context: "
            f"leave it at auto, or set decode_context_parallel_size to 1, not {comm.size}"
        )
    rank, ranks = comm.rank, comm.size

    class ContextBackend:
        name: ClassVar[str] = backend.name
        dtypes: ClassVar[tuple[str, ...]] = backend.dtypes
        paged: ClassVar[bool] = True
        layouts: ClassVar[tuple[str, ...]] = backend.layouts
        captured: ClassVar[bool] = False  # ranks meet in every layer
        in_teams: ClassVar[bool] = False
        features: ClassVar[tuple[str, ...]] = ("window", "context_parallel", *BEFORE_THE_CACHE)

        def __init__(self, spec: AttentionSpec) -> None:
            refuse_unsupported(self.name, spec, self.features)
            self.spec = spec
            self.few_rows = 0

        @staticmethod
        def prepare(batch: ForwardBatch) -> OwnPlaces:
            return OwnPlaces(own_slots(batch.slots, batch.block_size // ranks, rank, ranks), batch.tables)

        def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
            places = batch.positions[0], batch.attention.slots
            if cache["k"].dtype != qkv.dtype:  # on a CPU alone
                q, k, v = split_heads(qkv, self.spec)
                q, k = norm_and_rotate(q, k, norms, rope, places[0])
                keep(cache, k, v, places[1])
                return q
            return write_kv(qkv, norm_weights(norms), rope.cos, rope.sin, *places, cache["k"], cache["v"])

        def attend(self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None) -> Tensor:
            heads = self.spec.num_heads
            of_all = comm.all_gather(q.flatten(1)).unflatten(1, (ranks * heads, -1))  # [T, heads of the group, head_dim]
            part, lse = partial_attention(
                of_all, cache["k"], cache["v"], batch.attention.tables, batch.query_start, batch.context_len, self.spec.scale, rank, ranks,
                self.spec.window, scales=(cache["k_scale"], cache["v_scale"]) if "k_scale" in cache else None,
            )  # fmt: skip
            weights = weights_of_ranks(comm.all_gather(lse.unsqueeze(-1)))  # [T, heads of the group, ranks]
            merged = comm.all_reduce(part.mul_(weights[..., rank, None]))
            return out.copy_(merged[:, rank * heads : (rank + 1) * heads])

    return ContextBackend


def over_regions(backend: type[AttentionBackend], comm: Comm) -> type[AttentionBackend]:
    """Returns the twin of a backend of `over_context`, for proofs. It has no block tables: row r owns region r of a contiguous cache.

    A region holds the tokens that this rank keeps, in order. To the kernels it is blocks in a row. Padding and the tokens of other ranks
    own the last region.
    """
    rank, ranks = comm.rank, comm.size

    class ContextRegions(backend):  # type: ignore[valid-type, misc]
        name: ClassVar[str] = "contiguous"
        paged: ClassVar[bool] = False

        @staticmethod
        def prepare(batch: ForwardBatch) -> OwnPlaces:
            """Computes everything on the device: the host is not asked."""
            (count, length), size = batch.caches[0]["k"].shape[:2], batch.block_size // ranks
            blocks = torch.arange(batch.tables.shape[1], device=batch.tables.device, dtype=batch.tables.dtype)
            regions, of_tokens = region_places(batch, count)
            slots = of_tokens.long() * length * ranks + batch.positions[0]  # in regions that cover all ranks
            return OwnPlaces(own_slots(slots, size, rank, ranks, (count - 1) * length), regions[:, None] * (length // size) + blocks)

        def attend(self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None) -> Tensor:
            size = batch.block_size // ranks
            blocks = {name: buffer.view(-1, size, *buffer.shape[2:]) for name, buffer in cache.items()}
            attended: Tensor = super().attend(q, blocks, batch, out, sinks)
            return attended

    return ContextRegions
