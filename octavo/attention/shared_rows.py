"""Attention of rows with shared keys: over the keys of each node once for all its rows, then over the other keys of each row.

    node    queries of its rows [1, rows, heads, head_dim] over its keys [1, keys, kv_heads, head_dim]
    rest    a `RowGroup` of rows, each from the end of its last node on

Each gives a part of the result and its log-sum-exp, in float32. The merged parts of a row equal attention over all its keys at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.row_groups import RowGroup, group_rows
from octavo.attention.spec import AttentionSpec
from octavo.kernels.reference.attention import Sloped, attend_part, zero_tail
from octavo.kernels.reference.merge import merge_two, with_sinks
from octavo.step.shared_keys import BEGIN, COUNT, END, FIRST

Keys = tuple[Tensor, Tensor]  # k and v, [rows, tokens, kv_heads, head_dim] in float32


@dataclass(slots=True)
class KeyNode:
    row: int  # of the batch: one of those with these keys
    blocks: Tensor  # the same keys, in the pool
    tokens: Tensor  # [rows] int64, the queries of all of them
    context_len: Tensor  # [rows]
    begin: int
    end: int
    _seen: dict[int | None, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def seen(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        """Returns the queries that see any of the keys, and the mask for their scores [1, 1, queries, keys]. Layers share it."""
        if window not in self._seen:
            first = self.context_len - (window or self.end + int(self.context_len.max()))  # the first key that each sees
            kept = first < self.end
            hidden = torch.arange(self.begin, self.end) < first[kept, None]
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[None, None] if hidden.any() else None
            self._seen[window] = self.tokens[kept], mask
        return self._seen[window]

    def behind(self) -> Tensor:
        """Returns each key's position minus that of the query, [1, queries, keys] float32. No query has a window."""
        return (torch.arange(self.begin, self.end) - (self.context_len[:, None] - 1)).float()[None]


@dataclass(frozen=True, slots=True)
class SharedRows:
    nodes: list[KeyNode]
    rest: list[RowGroup]
    tokens: Tensor  # [rows] int64, the queries of all these rows, in order


def split_rows(batch: ForwardBatch) -> tuple[list[RowGroup], SharedRows | None]:
    """Returns the groups of rows without shared keys, and the other rows, if there are any."""
    shared = batch.shared
    if not len(shared.nodes):
        return group_rows(batch), None
    first, nodes = torch.zeros_like(batch.context_len), []
    for node in shared.nodes.tolist():
        index = torch.from_numpy(shared.rows[node[FIRST] : node[FIRST] + node[COUNT]]).long()
        first[index] = node[END]
        blocks = batch.tables[index[0], node[BEGIN] // batch.block_size : node[END] // batch.block_size]
        tokens, context_len = batch.query_start[index].long(), batch.context_len[index].long()
        nodes.append(KeyNode(int(index[0]), blocks, tokens, context_len, node[BEGIN], node[END]))
    together: list[int] = (first > 0).nonzero().flatten().tolist()
    alone: list[int] = (first == 0).nonzero().flatten().tolist()
    return group_rows(batch, alone), SharedRows(nodes, group_rows(batch, together, first), batch.query_start[together].long())


class Merged:
    """Merges the partial results of queries, weighted by their log-sum-exp."""

    def __init__(self, tokens: Tensor, heads: int, value_dim: int) -> None:
        """`tokens`: of all queries, in order"""
        self._tokens = tokens
        self._mixed = torch.zeros(len(tokens), heads, value_dim)
        self._lse = torch.full((len(tokens), heads), -torch.inf)

    def add(self, tokens: Tensor, mixed: Tensor, lse: Tensor) -> None:
        """mixed: [N, heads, value_dim], lse: [N, heads]"""
        places = torch.searchsorted(self._tokens, tokens)
        self._mixed[places], self._lse[places] = merge_two(self._mixed[places], self._lse[places], mixed, lse)

    def give(self, sinks: Tensor | None, out: Tensor) -> None:
        if sinks is not None:
            self._mixed *= (self._lse - with_sinks(self._lse, sinks)).exp_().unsqueeze(-1)
        out.index_copy_(0, self._tokens, self._mixed.to(out.dtype))


def attend_shared(
    q: Tensor, shared: SharedRows, keys_of_node: Callable[[KeyNode], Keys], keys_of_rest: Callable[[RowGroup], tuple[Keys, Tensor]],
    spec: AttentionSpec, out: Tensor, sinks: Tensor | None, slopes: Tensor | None,
) -> None:  # fmt: skip
    """Fills the part of out that belongs to these rows. The keys of the rest come with the positions to set to zero."""
    assert slopes is None or spec.window is None
    merged = Merged(shared.tokens, *out.shape[1:])

    def add(part: KeyNode | RowGroup, tokens: Tensor, shape: tuple[int, int], keys: Keys, mask: Tensor | None) -> None:
        queries = q.index_select(0, tokens).float().view(*shape, *q.shape[1:])
        sloped = None if slopes is None else Sloped(slopes, part.behind())
        mixed, lse = attend_part(queries, *keys, mask, spec.scale, spec.soft_cap, sloped)
        merged.add(tokens, mixed.flatten(0, 1), lse.flatten(0, 1))

    for node in shared.nodes:
        tokens, mask = node.seen(spec.window)
        if len(tokens):
            add(node, tokens, (1, len(tokens)), keys_of_node(node), mask)
    for group in shared.rest:
        (k, v), tail = keys_of_rest(group)
        k, v = (zero_tail(one, tail)[:, : group.length] for one in (k, v))
        add(group, group.tokens, (len(group.index), 1), (k, v), group.mask(spec.window, torch.float32, by_scores=True)[0])
    merged.give(sinks, out)
