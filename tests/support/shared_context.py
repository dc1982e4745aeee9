"""Sequences in one cache, and the same sequences shared out over the caches of several ranks, with NaN wherever nothing was written."""

import torch
from torch import Tensor

from octavo.kernels.reference.attention import paged_attention

Rows = list[tuple[int, int]]  # a row's queries and its context


class SharedContext:
    def __init__(
        self, rows: Rows, size: int, ranks: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ranks, self.scale, span = ranks, dim**-0.5, size * ranks
        width = max(-(-context // span) for _, context in rows) or 1
        blocks = torch.randperm(len(rows) * width, generator=generator).view(len(rows), width) + 1
        self.tables = torch.zeros_like(blocks)  # padded with the null block
        whole = torch.full((2, len(rows) * width + 1, span, kv_heads, dim), torch.nan)
        for row, (_, context) in enumerate(rows):
            used = -(-context // span)
            self.tables[row, :used] = blocks[row, :used]
            places = (blocks[row] * span)[:, None].add(torch.arange(span)).flatten()[:context]
            whole.flatten(1, 2)[:, places] = torch.randn(2, context, kv_heads, dim, generator=generator)
        self.whole = whole.to(dtype)
        self.parts = [part.contiguous() for part in self.whole.unflatten(2, (ranks, size)).unbind(2)]  # [2, blocks, size, ...] of each rank
        counts = torch.tensor([queries for queries, _ in rows])
        self.query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.context_len = torch.tensor([context for _, context in rows])
        self.q = torch.randn(int(counts.sum()), heads, dim, generator=generator).to(dtype)

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tables, self.query_start, self.context_len

    def to(self, device: str) -> "SharedContext":
        for name in ("tables", "whole", "query_start", "context_len", "q"):
            setattr(self, name, getattr(self, name).to(device))
        self.parts = [part.to(device) for part in self.parts]
        return self

    def exact(self, window: int | None) -> Tensor:
        """Returns attention over all keys [T, heads, head_dim] float32."""
        out = torch.zeros(self.q.shape, device=self.q.device)
        return paged_attention(self.q, *self.whole, *self.rows, self.scale, out, window)
