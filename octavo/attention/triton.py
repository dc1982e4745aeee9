"""Paged attention on a GPU: two kernels over the cache in place, one for rows of one query, one for rows of more.

`attention/cpu.py` has the drawing of blocks and tables. Here nothing is gathered: a kernel looks each block up as it reads it.
`TritonRegions` is the same over a contiguous cache, for the proof that paging is invisible: equal tiles in equal order, so
equal bits. On tensors of the CPU the kernels' twins run.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from octavo.attention.backend import AttentionSpec, QKNorm, Rope, refuse_unsupported
from octavo.attention.forward_batch import ForwardBatch
from octavo.kernels.ops import decode_attention_parts, decode_shares, few_rows, paged_attention, write_kv


class Shares:
    """How decode is divided in a step: counted by the first layer that asks, once for each window that layers have."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._rows = batch.query_start, batch.context_len
        self._by_window: dict[int | None, Tensor | None] = {}

    def of(self, window: int | None, k_cache: Tensor) -> Tensor | None:
        if window not in self._by_window:
            self._by_window[window] = decode_shares(*self._rows, k_cache, window)
        return self._by_window[window]


class TritonBackend:
    name: ClassVar[str] = "triton"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    layout: ClassVar[Literal["paged", "contiguous"]] = "paged"

    def __init__(self, spec: AttentionSpec) -> None:
        refuse_unsupported(self.name, spec, supported=("window",))
        self.spec = spec
        self.few_rows = few_rows(spec.head_dim)

    @staticmethod
    def prepare(batch: ForwardBatch) -> Shares:
        return Shares(batch)

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: dict[str, Tensor], batch: ForwardBatch) -> Tensor:
        return write_kv(qkv, _weights(norms), rope.cos, rope.sin, batch.positions[0], batch.slots, cache["k"], cache["v"])

    def attend(self, q: Tensor, cache: dict[str, Tensor], batch: ForwardBatch, out: Tensor) -> Tensor:
        return paged_attention(
            q, cache["k"], cache["v"], batch.tables, batch.query_start, batch.context_len, self.spec.scale, out, batch.max_query,
            batch.attention.of(self.spec.window, cache["k"]), self.spec.window, fresh=_fresh(q, self.spec),
        )  # fmt: skip

    def attend_few(
        self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: dict[str, Tensor], batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        return decode_attention_parts(
            qkv, _weights(norms), rope.cos, rope.sin, batch.positions[0], batch.slots, batch.tables, batch.context_len,
            cache["k"], cache["v"], self.spec.scale, self.spec.window,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Regions:
    of_rows: Tensor  # [R, 1]
    of_tokens: Tensor  # [T]
    shares: Shares


class TritonRegions:
    """Over the regions of a contiguous cache: row r owns region r. Padding owns the last one."""

    name: ClassVar[str] = "triton"
    dtypes: ClassVar[tuple[str, ...]] = TritonBackend.dtypes
    layout: ClassVar[Literal["paged", "contiguous"]] = "contiguous"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.few_rows = few_rows(spec.head_dim)

    @staticmethod
    def prepare(batch: ForwardBatch) -> Regions:
        regions = torch.where(batch.rows < 0, batch.caches[0]["k"].shape[0] - 1, batch.rows)
        of_tokens = torch.full_like(batch.slots, -1)
        starts = batch.query_start.tolist()
        for region, start, end in zip(regions.tolist(), starts, starts[1:]):
            of_tokens[start:end] = region
        return Regions(regions[:, None].contiguous(), of_tokens, Shares(batch))

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: dict[str, Tensor], batch: ForwardBatch) -> Tensor:
        regions = batch.attention.of_tokens
        slots = (regions % len(cache["k"])) * cache["k"].shape[1] + batch.positions[0]  # of tokens behind the last entry: padding's
        return write_kv(qkv, _weights(norms), rope.cos, rope.sin, batch.positions[0], slots, cache["k"], cache["v"])

    def attend(self, q: Tensor, cache: dict[str, Tensor], batch: ForwardBatch, out: Tensor) -> Tensor:
        regions: Regions = batch.attention
        return paged_attention(
            q, cache["k"], cache["v"], regions.of_rows, batch.query_start, batch.context_len, self.spec.scale, out, batch.max_query,
            regions.shares.of(self.spec.window, cache["k"]), self.spec.window, paged=False, fresh=_fresh(q, self.spec),
        )  # fmt: skip

    def attend_few(
        self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: dict[str, Tensor], batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Regions are blocks in a row: a table counts up from the first of its region."""
        tables, of_tokens = batch.attention.of_rows, batch.attention.of_tokens
        size = batch.block_size
        blocks = cache["k"].shape[1] // size
        k_cache, v_cache = (cache[name].view(-1, size, *cache[name].shape[2:]) for name in "kv")
        counted = tables * blocks + torch.arange(batch.tables.shape[1], device=tables.device, dtype=tables.dtype)
        return decode_attention_parts(
            qkv, _weights(norms), rope.cos, rope.sin, batch.positions[0], of_tokens * blocks * size + batch.positions[0], counted,
            batch.context_len, k_cache, v_cache, self.spec.scale, self.spec.window,
        )  # fmt: skip


def _fresh(q: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """k and v of this step's tokens: they stand behind q in qkv, of which it is a view."""
    parts = q.as_strided((len(q), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim), q.stride())
    k, v = parts[:, spec.num_heads :].chunk(2, dim=1)
    return k, v


def _weights(norms: QKNorm | None) -> tuple[Tensor, Tensor, float] | None:
    return None if norms is None else (norms.q_weight, norms.k_weight, norms.eps)
