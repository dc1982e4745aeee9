"""Finds shared prefixes among the rows of a step: rows whose block tables have a common prefix have the same keys there.

    row 0   [ 7 2 | 5 9 | 4 ]         nodes    rows 0 2 3 1    keys of blocks 0 and 1
    row 1   [ 7 2 | 6 1 ]                      rows 0 2        keys of blocks 2 and 3
    row 2   [ 7 2 | 5 9 | 3 ]
    row 3   [ 7 2 | 8 ]               each row reads the rest of its keys alone

The nodes of a row are contiguous, starting at its first key. Attention over the keys of a node is computed for all its rows
at once, and the results for a row's nodes and for its own keys are merged by log-sum-exp.

`RowOrder` sorts the rows so that those with the longest common prefix are adjacent. It persists between steps: a row is inserted
when its table is new, and a step with the same rows as the previous one compares no blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from platform import machine

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]

FIRST, COUNT, BEGIN, END = range(4)  # fields of a node: its index in `rows` and their number; its keys
NULL_BLOCK = 0  # replaces blocks freed behind a window
FORGET = 8  # steps after which an absent row is removed: the stages of a pipeline have several batches in flight


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The nodes of one cache group. A node comes after the node with the keys before its own."""

    nodes: Words  # [N, 4]
    rows: Words  # of all nodes, concatenated


@dataclass(frozen=True, slots=True)
class ReadCost:
    """The cost of shared reading, in units of keys that one row reads."""

    node: int  # per node
    row: int  # per row of a node: one more part to merge


FREE = ReadCost(node=0, row=0)
# Fitted with the layers of the default model by `bench/shared_keys.py`, on two cores of a Neoverse-N1: native kernels in float16, torch in
# float32. Other machines use the values that were chosen on x86-64, where sharing pays off from 64 keys on. GPU_COST is for an H200, with
# the heads of Qwen3-0.6B in bfloat16.
NATIVE_COST = ReadCost(node=740, row=310) if machine() == "aarch64" else ReadCost(node=48, row=8)
TORCH_COST = ReadCost(node=4500, row=40)
GPU_COST = ReadCost(node=17000, row=40)

NOTHING = SharedKeys(np.zeros((0, 4), np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True)
class AllShared:
    """The nodes of all cache groups, in the layout of the native library."""

    start: Words  # [groups + 1]: the first node of each
    nodes: Words  # [N, 4]
    rows: Words

    @staticmethod
    def of(groups: Sequence[SharedKeys]) -> "AllShared":
        nodes = [keys.nodes.copy() for keys in groups]
        places = np.cumsum([0, *(len(keys.rows) for keys in groups)], dtype=np.int32)
        for moved, place in zip(nodes, places):
            moved[:, FIRST] += place
        start = np.cumsum([0, *map(len, nodes)], dtype=np.int32)
        return AllShared(start, np.concatenate(nodes), np.concatenate([keys.rows for keys in groups]))

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """The addresses of the arrays. The caller must keep this object alive."""
        return self.start.ctypes.data, self.nodes.ctypes.data, self.rows.ctypes.data


class RowOrder:
    """Rows sorted so that tables with a common prefix are adjacent: a traversal of the tree of prefixes."""

    def __init__(self, tables: Words) -> None:
        """`tables`: [rows, blocks], of all rows. They are read whenever a row is inserted."""
        self._tables = tables
        self.rows = np.zeros(0, np.int64)
        self.alike = np.zeros(0, np.int64)  # for each of `rows`, the length in blocks of the prefix shared with the row before it
        self.full = np.zeros(len(tables), np.int64)  # for each row, blocks that it will not write to again

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Removes all other rows. kept: a flag for each of `rows`"""
        self.rows, self.alike = self.rows[kept], self.among(kept)

    def among(self, some: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns `alike` for a subset of the rows. some: a flag for each of `rows`"""
        places = np.flatnonzero(some)
        alike = np.minimum.reduceat(np.append(self.alike, 0), np.append(0, places + 1))[: len(places)]  # also across omitted rows
        alike[:1] = 0
        return alike

    def add(self, rows: NDArray[np.int64]) -> None:
        """Inserts rows, each as if it came after the one before it: behind the rows with the same first block, among these behind
        those with the same second block, and so on."""
        lengths = self._lengths(rows)
        found: list[tuple[int, int, list[int], list[int]]] = []  # place, depth, new rows for that place, what each shares with the next
        waiting = [(0, len(self.rows), 0, list(range(len(rows))))]  # indices of new rows that share `depth` blocks with [low, high)
        while waiting:
            low, high, depth, new = waiting.pop()
            groups: dict[int, list[int]] = {}  # by the next block; rows that end here are alone
            for index in new:
                block = int(self._tables[rows[index], depth]) if lengths[index] > depth else -1 - index
                groups.setdefault(block, []).append(index)
            for block, some in groups.items():
                if block < 0 or low == high or (child := self._child(low, high, depth, block)) is None:
                    found.append((high, depth, *self._tree(rows, lengths, some, depth)))
                else:
                    waiting.append((*child, self._common(*child, depth, rows[some], lengths[some]), some))
        found.sort(key=lambda one: (one[0], -one[1]))  # at one place, those with more in common first
        places = np.repeat([place for place, *_ in found], [len(some) for _, _, some, _ in found])
        self.rows = np.insert(self.rows, places, rows[[index for _, _, some, _ in found for index in some]])
        self.alike = np.insert(self.alike, places, [each for _, depth, _, depths in found for each in (depth, *depths)])

    def _lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many blocks each row may share: those that it will not write to again, up to the first null block."""
        full = self.full[rows]
        is_null = self._tables[rows, : int(full.max())] == NULL_BLOCK
        return np.where(is_null.any(1), np.minimum(full, is_null.argmax(1)), full) if is_null.any() else full

    def _child(self, low: int, high: int, depth: int, block: int) -> tuple[int, int] | None:
        """Returns the first rows of [low, high) with this block at this depth, if there are any. All share the blocks before it."""
        others = self.rows[low:high]
        (same,) = ((self._tables[others, depth] == block) & (self.full[others] > depth)).nonzero()
        if not len(same):
            return None
        first = low + int(same[0])
        (different,) = (self.alike[first + 1 : high] <= depth).nonzero()
        return first, first + 1 + int(different[0]) if len(different) else high

    def _common(self, low: int, high: int, depth: int, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        """Returns the number of blocks that all these rows and those of [low, high) have in common; up to `depth` they are equal."""
        first = self.rows[low]
        most = min(int(self.alike[low + 1 : high].min(initial=self.full[first])), int(self.full[first]), int(lengths.min()))
        (different,) = (self._tables[rows, depth:most] != self._tables[first, depth:most]).any(0).nonzero()
        return depth + int(different[0]) if len(different) else most

    def _tree(self, rows: NDArray[np.int64], lengths: NDArray[np.int64], some: list[int], depth: int) -> tuple[list[int], list[int]]:
        """Returns rows with a common beginning in their order, and the blocks that each but the first shares with the one before it.

        Rows are sorted by their blocks, so the rows of each subtree are neighbours. Its children are then sorted by their first rows.
        """
        if len(some) == 1:
            return some, []
        lines = self._tables[rows[some], : int(lengths[some].max())]
        keys = [line[:length].tobytes() for line, length in zip(lines, lengths[some].tolist())]
        order = sorted(range(len(some)), key=keys.__getitem__)
        some = [some[at] for at in order]
        lines = lines[order]
        differ = lines[1:, depth:] != lines[:-1, depth:]
        ends = np.minimum(lengths[some[1:]], lengths[some[:-1]])
        depths = np.minimum(np.where(differ.any(1), depth + differ.argmax(1), lines.shape[1]), ends).tolist()
        open_ones: list[tuple[int, list[tuple[list[int], list[int]]]]] = []  # from the outermost to the innermost: depth, children
        done: tuple[list[int], list[int]] = [some[0]], []
        for index, deep in zip([*some[1:], -1], [*depths, -1]):
            while open_ones and open_ones[-1][0] > deep:
                around, children = open_ones.pop()
                done = _joined(around, [*children, done])
            if not open_ones or open_ones[-1][0] < deep:
                open_ones.append((deep, []))
            open_ones[-1][1].append(done)
            done = [index], []
        return open_ones[0][1][0]


def _joined(depth: int, children: list[tuple[list[int], list[int]]]) -> tuple[list[int], list[int]]:
    """Joins subtrees that share `depth` blocks, those first whose first row came first."""
    (rows, depths), *others = sorted(children)
    for more, inner in others:
        rows += more
        depths += [depth, *inner]
    return rows, depths


class SharedReads:
    """The nodes of the rows of one cache group, from step to step."""

    def __init__(self, tables: Words, span: int, cost: ReadCost) -> None:
        """`tables`: [rows, blocks], as the plans change them. `span`: tokens in a block"""
        self._order = RowOrder(tables)
        self._span, self.cost = span, cost
        self._step = 0
        self._seen = np.zeros(len(tables), np.int64)  # the last step of each row; 0: it is not in the order
        self._version = np.full(len(tables), -1, np.int64)  # of each row's table, when the row was inserted
        self._last: tuple[Words, SharedKeys] | None = None  # rows, and their nodes

    def nodes(self, rows: Words, context: Words, versions: NDArray[np.int64]) -> SharedKeys:
        """Returns the nodes of rows that have one query each. Nodes refer to rows by their index in `rows`.

        `context`: keys of each, the last of which is written in this step. `versions`: of all tables; the version of a table is
        incremented by each change except appends
        """
        self._step += 1
        if self._last is None or (self._version[rows] != versions[rows]).any() or not np.array_equal(self._last[0], rows):
            self._order.full[rows] = (context - 1) // self._span
            self._place(rows, versions)
            self._last = rows.copy(), self._chosen(rows)
        self._seen[rows] = self._step
        return self._last[1]

    def _place(self, rows: Words, versions: NDArray[np.int64]) -> None:
        """Inserts new rows. A row whose table was changed is removed first, since its position may be wrong."""
        gone = (self._seen > 0) & ((self._version != versions) | (self._seen < self._step - FORGET))
        self._seen[gone] = 0
        if gone.any():
            self._order.keep(~gone[self._order.rows])
        new = rows[self._seen[rows] == 0]
        if len(new):
            self._order.add(new)
        self._version[new] = versions[new]

    def _chosen(self, rows: Words) -> SharedKeys:
        place = np.full(len(self._seen), -1, np.int64)
        place[rows] = np.arange(len(rows))
        places = place[self._order.rows]
        alike = self._order.among(places >= 0)
        return choose_nodes(places[places >= 0], alike * self._span, self.cost) if alike.any() else NOTHING


@dataclass(slots=True)
class _Beginning:
    """Rows [low, high) of an order that share their first `depth` keys."""

    depth: int
    low: int
    high: int = 0
    readers: int = 0  # how often the last of these keys is read if it is not shared: by rows, or by nodes after this one


def choose_nodes(rows: NDArray[np.int64], alike: NDArray[np.int64], cost: ReadCost) -> SharedKeys:
    """Returns the nodes that pay off, for rows in their order. `alike`: keys shared with the row before; 0 for the first

    A prefix pays off if the saved key reads outweigh the cost of a node. The prefixes inside it are decided
    first, by the keys they add to it; then, from the outside in, a prefix also gets the keys of enclosing ones that did not pay off.
    """
    nodes: list[tuple[int, int, int, int]] = []
    found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    outer, place = [_Beginning(0, 0, len(rows))], 0
    for beginning in sorted(_beginnings(alike, cost), key=lambda one: (one.low, -one.high)):
        while beginning.low >= outer[-1].high:
            outer.pop()
        begin, count = outer[-1].depth, beginning.high - beginning.low
        if _worth(beginning, begin, cost):
            outer.append(beginning)
            nodes.append((place, count, begin, beginning.depth))
            found.append(rows[beginning.low : beginning.high])
            place += count
    return SharedKeys(np.array(nodes, np.int32).reshape(-1, 4), np.concatenate(found).astype(np.int32))


def _worth(beginning: _Beginning, begin: int, cost: ReadCost) -> bool:
    saved = (beginning.readers - 1) * (beginning.depth - begin)
    return saved > 0 and saved >= cost.node + cost.row * (beginning.high - beginning.low)


def _beginnings(alike: NDArray[np.int64], cost: ReadCost) -> Iterable[_Beginning]:
    """Yields every prefix that some rows have in common, inner ones before the enclosing one."""
    depths = np.append(alike[1:], 0)  # between each row and the next
    firsts = np.flatnonzero(np.append(True, depths[1:] != depths[:-1]))  # of runs of rows with the same depth
    counts = np.append(firsts[1:], len(depths)) - firsts
    open_ones = [_Beginning(0, 0)]  # from the outermost to the innermost
    for row, count, depth in zip(firsts.tolist(), counts.tolist(), depths[firsts].tolist()):
        low, readers = row, 1
        while depth < open_ones[-1].depth:
            done = open_ones.pop()
            done.high, done.readers = row + 1, done.readers + readers
            around = max(depth, open_ones[-1].depth)
            low, readers = done.low, 1 if _worth(done, around, cost) else done.readers
            yield done
        if depth > open_ones[-1].depth:
            open_ones.append(_Beginning(depth, low))
        open_ones[-1].readers += readers + count - 1
