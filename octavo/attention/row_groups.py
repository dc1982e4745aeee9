"""Groups of rows that are computed together: with the same number of query tokens, and pasts of similar length.

All decode rows have one query token, so a batch of them forms very few groups; so do prompts that arrived
together. Each row of a group is padded to the longest one, and no row by more than half its length (and a little).

    context_len   640 600 590 | 180 171        two groups of decode rows, five rows, two calls per layer

A row that shares its first keys with others (`shared_rows.py`) is grouped by the rest of its keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.attention.forward_batch import ForwardBatch
from octavo.kernels.reference.attention import causal_mask

# Rows that are at most this much (in tokens) shorter than 2/3 of the longest still join its group: a call costs more than the padding.
SLACK = 64


@dataclass(slots=True)
class RowGroup:
    index: Tensor  # [rows] int64, their indices in the batch
    tokens: Tensor  # [rows * num_query] int64, their query tokens in the batch
    first: Tensor  # [rows]: the first key that each reads here
    context_len: Tensor  # [rows]: keys from there on
    num_query: int
    length: int  # keys of the longest row
    num_blocks: int  # blocks of the longest row
    blocks: Tensor  # [rows * num_blocks], in the pool; the null block after a row's last
    tail: Tensor  # padding in the loaded keys, as row * num_blocks * block_size + position
    edge: Tensor  # the part of it in a row's own last block; the rest of the padding is null blocks
    even: bool  # all rows have `length` keys
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _behind: Tensor | None = None

    def behind(self) -> Tensor:
        """Returns each key's position minus the query's, [rows, num_query, length] float32. Layers share it."""
        if self._behind is None:
            query = self.context_len[:, None, None] - self.num_query + torch.arange(self.num_query)[:, None]
            self._behind = (torch.arange(self.length) - query).float()
        return self._behind

    def mask(self, window: int | None, dtype: torch.dtype, by_scores: bool = False) -> tuple[Tensor | None, bool]:
        """(mask, causal): a mask only if none of the faster ways is equivalent. Layers share it.

        `by_scores`: attention materialises its scores, and needs a mask for any row of several queries
        """
        if window is not None and window >= self.length:
            window = None
        if window is None and self.even and self.num_query in (1, 1 if by_scores else self.length):
            return None, self.num_query > 1
        if window not in self._masks:
            self._masks[window] = causal_mask(self.context_len, self.num_query, self.length, window, dtype)
        return self._masks[window], False


def group_rows(batch: ForwardBatch, rows: Sequence[int] | None = None, first: Tensor | None = None) -> list[RowGroup]:
    """Returns the groups of all rows; or of some, which are read from a given first key on. first: [R]"""
    queries: list[int] = batch.query_start.diff().tolist()
    first = torch.zeros_like(batch.context_len) if first is None else first
    contexts: list[int] = (batch.context_len - first).tolist()
    groups: list[list[int]] = []
    for row in sorted(range(len(queries)) if rows is None else rows, key=lambda row: (queries[row], contexts[row]), reverse=True):
        if groups and _joins(queries[row], contexts[row], queries[groups[-1][0]], contexts[groups[-1][0]]):
            groups[-1].append(row)
        elif queries[row]:
            groups.append([row])
    return [_row_group(batch, rows, first, queries[rows[0]], contexts[rows[0]]) for rows in groups]


def _joins(query: int, context: int, group_query: int, longest: int) -> bool:
    return query == group_query and context * 3 // 2 + SLACK >= longest


def _row_group(batch: ForwardBatch, rows: list[int], first: Tensor, num_query: int, length: int) -> RowGroup:
    index = torch.tensor(rows)
    context_len = batch.context_len[index] - first[index]
    num_blocks = -(-length // batch.block_size)
    position = torch.arange(num_blocks * batch.block_size)
        # No row reads beyond `length`, so only positions below it are listed.
    tail = (position >= context_len[:, None]) & (position < length)  # [rows, num_blocks * block_size]
    own = position // batch.block_size == context_len[:, None] // batch.block_size  # the block that contains the row's end
    return RowGroup(
        index=index,
        tokens=(batch.query_start[index, None] + torch.arange(num_query)).flatten(),
        first=first[index],
        context_len=context_len,
        num_query=num_query,
        length=length,
        num_blocks=num_blocks,
        blocks=_blocks(batch, index, first, num_blocks),
        tail=tail.flatten().nonzero().flatten(),
        edge=(tail & own & (context_len % batch.block_size > 0)[:, None]).flatten().nonzero().flatten(),
        even=length * len(rows) == int(context_len.sum()),
    )


def _blocks(batch: ForwardBatch, index: Tensor, first: Tensor, count: int) -> Tensor:
    if not first[index].any():
        return batch.tables[index, :count].flatten()
    place = first[index, None] // batch.block_size + torch.arange(count)
    held = place * batch.block_size < batch.context_len[index, None]
    return batch.tables[index[:, None], place.clamp_(max=batch.tables.shape[1] - 1)].mul_(held).flatten()
