"""Batches and caches by hand, for tests that run a model or a backend without an engine."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.models.decoder import Decoder
from octavo.worker.kv_store import NO_CODE


@dataclass
class Pool:
    """Rows with block tables over a shuffled pool, and both kinds of cache, filled with NaN where nothing was written."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    num_rows: int = 4
    max_len: int = 128
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # as dtype
    seed: int = 0
    position_offset: int = 0
    lengths: dict[int, int] = field(default_factory=dict)  # row -> tokens in the cache

    def __post_init__(self) -> None:
        blocks_per_row = -(-self.max_len // self.block_size)
        order = torch.randperm(self.num_rows * blocks_per_row, generator=torch.Generator().manual_seed(self.seed)) + 1
        self.tables = order.view(self.num_rows, blocks_per_row)
        self.paged = self._caches(len(order) + 1, self.block_size)
        for cache in self.paged:
            for buffer in cache.values():
                buffer[0] = 0  # the null block
        self.contiguous = self._caches(self.num_rows, blocks_per_row * self.block_size)

    def _caches(self, *shape: int) -> list[dict[str, Tensor]]:
        dtype = self.cache_dtype or self.dtype
        sizes = dict.fromkeys(("k", "v"), (dtype, (*shape, self.kv_heads, self.head_dim)))
        if dtype == torch.int8:
            sizes |= dict.fromkeys(("k_scale", "v_scale"), (torch.float32, (*shape, self.kv_heads)))
        return [
            {name: torch.full(size, NO_CODE if kind == torch.int8 else torch.nan, dtype=kind) for name, (kind, size) in sizes.items()}
            for _ in range(self.num_layers)
        ]

    def batch(self, backend: type[AttentionBackend], tokens: dict[int, list[int]]) -> ForwardBatch:
        """A step that appends tokens to rows, prepared for the backend. The rows' lengths are left as they are."""
        rows = list(tokens)
        starts = [self.lengths.get(row, 0) for row in rows]
        ends = [start + len(tokens[row]) for row, start in zip(rows, starts)]
        counts = torch.tensor([len(tokens[row]) for row in rows])
        index = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends)])
        token_rows = torch.tensor(rows).repeat_interleave(counts)
        width = max(-(-end // self.block_size) for end in ends)
        tables = torch.zeros(len(rows), width, dtype=torch.int64)
        for i, (row, end) in enumerate(zip(rows, ends)):
            used = -(-end // self.block_size)
            tables[i, :used] = self.tables[row, :used]
        query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        batch = ForwardBatch(
            token_ids=torch.tensor([token for row in rows for token in tokens[row]]),
            cache_index=index.int(),
            positions=index[None].int() + self.position_offset,
            rows=torch.tensor(rows),
            query_start=query_start,
            context_len=torch.tensor(ends),
            tables=tables,
            slots=self.tables[token_rows, index // self.block_size] * self.block_size + index % self.block_size,
            sample_index=query_start[1:] - 1,
            caches=self.paged if backend.capabilities.paged else self.contiguous,
            block_size=self.block_size,
        )
        batch.attention = backend.prepare(batch)
        return batch

    def advance(self, tokens: dict[int, list[int]]) -> None:
        for row, new in tokens.items():
            self.lengths[row] = self.lengths.get(row, 0) + len(new)


def run_steps(model: Decoder, backend: type[AttentionBackend], pool: Pool, steps: list[dict[int, list[int]]]) -> dict[int, Tensor]:
    """Logits of every token, per row [tokens, vocab], over several steps."""
    logits: dict[int, list[Tensor]] = {}
    with torch.inference_mode():
        for tokens in steps:
            batch = pool.batch(backend, tokens)
            all_logits = model.head(model(batch)).float()
            for i, row in enumerate(tokens):
                logits.setdefault(row, []).append(all_logits[batch.query_start[i] : batch.query_start[i + 1]])
            pool.advance(tokens)
    return {row: torch.cat(parts) for row, parts in logits.items()}


@dataclass
class DictCheckpoint:
    """A checkpoint held in memory."""

    tensors: dict[str, Tensor]
    source: str = "memory"

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def fingerprint(self) -> bytes:
        return b""
