"""Paged attention on a GPU: two kernels that read the cache in place, one for rows of one query, one for rows of more.

`attention/cpu.py` has a drawing of blocks and tables. Here nothing is gathered: a kernel looks each block up as it reads it.
`TritonRegions` is the same over a contiguous cache, to verify that paging changes no bit: equal tiles in equal order give
equal bits. For CPU tensors the reference kernels run.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from octavo.attention.backend import QKNorm, Rope
from octavo.attention.capabilities import INVARIANT, INVARIANT_REGIONS, TRITON, TRITON_REGIONS, Capabilities
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.kernels.ops import (
    decode_attention_parts,
    decode_shares,
    few_rows,
    invariant_attention,
    invariant_latent_attention,
    invariant_latent_shares,
    invariant_shares,
    invariant_write_latent,
    latent_attention,
    latent_shares,
    paged_attention,
    write_kv,
    write_latent,
)
from octavo.step.share_words import DecodeShares


class Shares:
    """How decode is divided in a step. It is computed once for each window, for the first layer with that window.

    Rows with a window do not use shared-prefix groups: each would see different keys.
    """

    def __init__(self, batch: ForwardBatch, invariant: bool = False) -> None:
        self._rows, self._teams, self.invariant = (batch.query_start, batch.context_len), batch.teams, invariant
        self._by_window: dict[int | None, DecodeShares | None] = {}
        self._of_latents: dict[int, DecodeShares | None] = {}  # by the number of heads

    def of(self, window: int | None, k_cache: Tensor) -> DecodeShares | None:
        if window not in self._by_window:
            self._by_window[window] = self._divided(window, k_cache)
        return self._by_window[window]

    def of_latents(self, heads: int, cache: Tensor) -> DecodeShares | None:
        if heads not in self._of_latents:
            divide = invariant_latent_shares if self.invariant else latent_shares
            self._of_latents[heads] = divide(*self._rows, cache, heads)
        return self._of_latents[heads]

    def _divided(self, window: int | None, k_cache: Tensor) -> DecodeShares | None:
        divide = invariant_shares if self.invariant else decode_shares
        return divide(*self._rows, k_cache, window, self._teams if window is None else None)


class TritonBackend:
    capabilities: ClassVar[Capabilities] = TRITON

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.few_rows = _few_rows(spec)

    @staticmethod
    def prepare(batch: ForwardBatch) -> Shares:
        return Shares(batch)

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
        return write_kv(qkv, norm_weights(norms), rope.cos, rope.sin, batch.rope_positions, batch.slots, cache["k"], cache["v"])

    def write_latent(
        self, q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], rope: Rope, cache: Cache, batch: ForwardBatch
    ) -> Tensor:
        return write_latent(q, kv, k_up, norm, rope.cos, rope.sin, batch.rope_positions, batch.slots, cache["k"])

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        if self.spec.latent is not None:
            return _attend_latents(self.spec, q, cache, batch, batch.tables, batch.attention, out)
        return paged_attention(
            q, cache["k"], cache["v"], batch.tables, batch.query_start, batch.context_len, self.spec.scale, out, batch.max_query,
            batch.attention.of(self.spec.window, cache["k"]), self.spec.window, fresh=_fresh(q, self.spec), soft_cap=self.spec.soft_cap,
            sinks=sinks, slopes=slopes,
        )  # fmt: skip

    def attend_few(
        self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return decode_attention_parts(
            qkv, norm_weights(norms), rope.cos, rope.sin, batch.rope_positions, batch.slots, batch.tables, batch.context_len,
            cache["k"], cache["v"], self.spec.scale, self.spec.window, self.spec.soft_cap, sinks,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Regions:
    of_rows: Tensor  # [R, 1]
    blocks: Tensor  # [R, B]: regions are consecutive blocks, so a table counts up from the first block of its region
    slots: Tensor  # [T]
    shares: Shares


class TritonRegions:
    """The same over the regions of a contiguous cache: row r owns region r. Padding, and tokens after the last row, own the last one."""

    capabilities: ClassVar[Capabilities] = TRITON_REGIONS

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.few_rows = _few_rows(spec)

    @staticmethod
    def prepare(batch: ForwardBatch) -> Regions:
        """Computes everything on the device, without synchronising."""
        keys = next((cache["k"] for cache in batch.caches if "k" in cache), None)  # None: a stage with recurrent layers only
        count, length = (1, batch.block_size) if keys is None else keys.shape[:2]
        regions, of_tokens = region_places(batch, count)
        blocks = torch.arange(batch.tables.shape[1], device=batch.slots.device, dtype=regions.dtype)
        return Regions(
            of_rows=regions[:, None],
            blocks=regions[:, None] * (length // batch.block_size) + blocks,
            slots=of_tokens.long() * length + batch.cache_index,
            shares=Shares(batch),
        )

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
        slots = batch.attention.slots
        return write_kv(qkv, norm_weights(norms), rope.cos, rope.sin, batch.rope_positions, slots, cache["k"], cache["v"])

    def write_latent(
        self, q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], rope: Rope, cache: Cache, batch: ForwardBatch
    ) -> Tensor:
        return write_latent(q, kv, k_up, norm, rope.cos, rope.sin, batch.rope_positions, batch.attention.slots, cache["k"])

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        regions: Regions = batch.attention
        if self.spec.latent is not None:
            return _attend_latents(self.spec, q, cache, batch, regions.of_rows, regions.shares, out, paged=False)
        return paged_attention(
            q, cache["k"], cache["v"], regions.of_rows, batch.query_start, batch.context_len, self.spec.scale, out, batch.max_query,
            regions.shares.of(self.spec.window, cache["k"]), self.spec.window, paged=False, fresh=_fresh(q, self.spec),
            soft_cap=self.spec.soft_cap, sinks=sinks, slopes=slopes,
        )  # fmt: skip

    def attend_few(
        self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = (cache[name].view(-1, batch.block_size, *cache[name].shape[2:]) for name in "kv")
        regions: Regions = batch.attention
        return decode_attention_parts(
            qkv, norm_weights(norms), rope.cos, rope.sin, batch.rope_positions, regions.slots, regions.blocks,
            batch.context_len, k_cache, v_cache, self.spec.scale, self.spec.window, self.spec.soft_cap, sinks,
        )  # fmt: skip


def _attend_latents(
    spec: AttentionSpec, q: Tensor, cache: Cache, batch: ForwardBatch, tables: Tensor, shares: Shares, out: Tensor, paged: bool = True
) -> Tensor:
    own, attend = shares.of_latents(spec.num_heads, cache["k"]), invariant_latent_attention if shares.invariant else latent_attention
    return attend(q, cache["k"], tables, batch.query_start, batch.context_len, spec.scale, out, batch.max_query, own, paged)


# -- the same with the kernels of `deterministic`: a row has the same bits beside any others, in any chunks and after any prefix hit


class InvariantBackend:
    capabilities: ClassVar[Capabilities] = INVARIANT
    write = TritonBackend.write

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec, self.few_rows = spec, 0

    @staticmethod
    def prepare(batch: ForwardBatch) -> Shares:
        return Shares(batch, invariant=True)

    def write_latent(
        self, q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], rope: Rope, cache: Cache, batch: ForwardBatch
    ) -> Tensor:
        return invariant_write_latent(q, kv, k_up, norm, rope.cos, rope.sin, batch.rope_positions, batch.slots, cache["k"])

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        return _attend_alike(self.spec, q, cache, batch, batch.tables, batch.attention, out, sinks, slopes)


class InvariantRegions:
    capabilities: ClassVar[Capabilities] = INVARIANT_REGIONS
    write = TritonRegions.write

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec, self.few_rows = spec, 0

    @staticmethod
    def prepare(batch: ForwardBatch) -> Regions:
        return replace(TritonRegions.prepare(batch), shares=Shares(batch, invariant=True))

    def write_latent(
        self, q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], rope: Rope, cache: Cache, batch: ForwardBatch
    ) -> Tensor:
        slots = batch.attention.slots
        return invariant_write_latent(q, kv, k_up, norm, rope.cos, rope.sin, batch.rope_positions, slots, cache["k"])

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        regions: Regions = batch.attention
        return _attend_alike(self.spec, q, cache, batch, regions.of_rows, regions.shares, out, sinks, slopes, paged=False)


def _attend_alike(
    spec: AttentionSpec, q: Tensor, cache: Cache, batch: ForwardBatch, tables: Tensor, shares: Shares, out: Tensor, sinks: Tensor | None,
    slopes: Tensor | None, paged: bool = True,
) -> Tensor:  # fmt: skip
    if spec.latent is not None:
        return _attend_latents(spec, q, cache, batch, tables, shares, out, paged)
    return invariant_attention(
        q, cache["k"], cache["v"], tables, batch.query_start, batch.context_len, spec.scale, out, batch.max_query,
        cast(DecodeShares, shares.of(spec.window, cache["k"])), spec.window, paged, spec.soft_cap, sinks, slopes,
    )  # fmt: skip


def region_places(batch: ForwardBatch, count: int) -> tuple[Tensor, Tensor]:
    """Returns the region of each row [R] and of each token [T], of `count` regions. Those of padding are the last."""
    starts = batch.query_start
    regions = torch.where(batch.rows < 0, count - 1, batch.rows)
    row_of_token = torch.searchsorted(starts, torch.arange(len(batch.slots), device=starts.device, dtype=starts.dtype), right=True) - 1
    return regions, torch.nn.functional.pad(regions, (0, 1), value=count - 1)[row_of_token]


def _few_rows(spec: AttentionSpec) -> int:
    """Returns 0 if all heads are normed together, since a program of the small-batch kernel has those of one KV head; and with ALiBi."""
    return 0 if spec.qk_norm == "whole" or spec.alibi else few_rows(spec.head_dim)


def _fresh(q: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Returns k and v of this step's tokens, which follow q in qkv. `q` is a view of qkv."""
    parts = q.as_strided((len(q), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim), q.stride())
    k, v = parts[:, spec.num_heads :].chunk(2, dim=1)
    return k, v


def norm_weights(norms: QKNorm | None) -> tuple[Tensor, Tensor, float] | None:
    return None if norms is None else (norms.q_weight, norms.k_weight, norms.eps)
