"""Which rows of a step read which keys together: rows whose block tables begin alike have the same keys there.

    row 0   [ 7 2 | 5 9 | 4 ]         nodes    rows 0 2 3 1    keys of blocks 0 and 1
    row 1   [ 7 2 | 6 1 ]                      rows 0 2        keys of blocks 2 and 3
    row 2   [ 7 2 | 5 9 | 3 ]
    row 3   [ 7 2 | 8 ]               the rest of its keys each row reads for itself

The nodes of a row follow one another without a gap, from its first key on. Attention over the keys of a node is computed for all its rows
at once, and what a row made of its nodes and of its own keys is merged by log-sum-exp.

`RowOrder` has the rows in an order in which those that share most are neighbours. It is kept from step to step: a row is looked up
when its table is new, and a step whose rows are those of the step before compares no blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from platform import machine

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]

FIRST, COUNT, BEGIN, END = range(4)  # words of a node: its place in `rows` and how many these are; its keys
NULL_BLOCK = 0  # stands where a window gave blocks back
FORGET = 8  # steps without a row, after which its place is given up: the stages of a pipeline have several batches on their way


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The nodes of one cache group, each behind the node whose keys come before its own."""

    nodes: Words  # [N, 4]
    rows: Words  # of all nodes, one after the other


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What reading together costs, counted in keys that one row reads."""

    node: int  # for each node
    row: int  # for each row of it: one more part to merge


FREE = ReadCost(node=0, row=0)
# Fitted with the layers of the default model by `bench/shared_keys.py`, on two cores of a Neoverse-N1: native kernels in float16, torch in
# float32. Other machines have the rule that was chosen on x86-64, where rows gain from 64 keys on. GPU_COST is that of an H200, with the
# heads of Qwen3-0.6B in bfloat16.
NATIVE_COST = ReadCost(node=740, row=310) if machine() == "aarch64" else ReadCost(node=48, row=8)
TORCH_COST = ReadCost(node=4500, row=40)
GPU_COST = ReadCost(node=17000, row=40)

NOTHING = SharedKeys(np.zeros((0, 4), np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True)
class AllShared:
    """The nodes of all cache groups, as the native library reads them."""

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
        """Where the arrays begin. Whoever passes them on keeps this object."""
        return self.start.ctypes.data, self.nodes.ctypes.data, self.rows.ctypes.data


class RowOrder:
    """Rows in an order in which those whose tables begin alike are neighbours: a walk through the tree of their beginnings."""

    def __init__(self, tables: Words) -> None:
        """`tables`: [rows, blocks], of all rows there are. It is read whenever a row gets its place."""
        self._tables = tables
        self.rows = np.zeros(0, np.int64)
        self.alike = np.zeros(0, np.int64)  # of each in `rows`, blocks at the beginning that are those of the row before it
        self.full = np.zeros(len(tables), np.int64)  # of each row, blocks that it will not write to again

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Lets all other rows go. kept: of each in `rows`"""
        self.rows, self.alike = self.rows[kept], self.among(kept)

    def among(self, some: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns `alike` of some rows among themselves. some: of each in `rows`"""
        places = np.flatnonzero(some)
        alike = np.minimum.reduceat(np.append(self.alike, 0), np.append(0, places + 1))[: len(places)]  # also with rows between them
        alike[:1] = 0
        return alike

    def add(self, row: int) -> None:
        """Finds the place of a row: among those that have its first block, among these those that go on like it, and so on."""
        low, high, depth = 0, len(self.rows), 0  # the rows of [low, high) have `depth` blocks in common with it
        while depth < self.full[row] and self._tables[row, depth] != NULL_BLOCK:
            others = self.rows[low:high]
            (same,) = ((self._tables[others, depth] == self._tables[row, depth]) & (self.full[others] > depth)).nonzero()
            if not len(same):
                break
            low += int(same[0])
            (different,) = (self.alike[low + 1 : high] <= depth).nonzero()
            high = low + 1 + int(different[0]) if len(different) else high
            depth = self._common(row, int(self.rows[low]), depth, int(self.alike[low + 1 : high].min(initial=self._tables.shape[1])))
        self.rows = np.insert(self.rows, high, row)
        self.alike = np.insert(self.alike, high, depth)

    def _common(self, row: int, other: int, first: int, last: int) -> int:
        """Returns how many blocks two rows have in common, at most `last`; the first of them are known to be the same."""
        last = min(last, int(self.full[row]), int(self.full[other]))
        one = self._tables[row, first:last]
        (different,) = ((one != self._tables[other, first:last]) | (one == NULL_BLOCK)).nonzero()
        return first + int(different[0]) if len(different) else last


class SharedReads:
    """The nodes of the rows of one cache group, from step to step."""

    def __init__(self, tables: Words, span: int, cost: ReadCost) -> None:
        """`tables`: [rows, blocks], as the plans change them. `span`: tokens in a block"""
        self._order = RowOrder(tables)
        self._span, self.cost = span, cost
        self._step = 0
        self._seen = np.zeros(len(tables), np.int64)  # the last step of each row; 0: it has no place
        self._version = np.full(len(tables), -1, np.int64)  # of each row's table, when it got its place
        self._last: tuple[Words, SharedKeys] | None = None  # rows, and their nodes

    def nodes(self, rows: Words, context: Words, versions: NDArray[np.int64]) -> SharedKeys:
        """Returns the nodes of rows that have one query each. Nodes name rows by their place in `rows`.

        `context`: keys of each, the last of which is written in this step. `versions`: of all tables there are; that of a row counts the
        changes of its table other than at its end
        """
        self._step += 1
        if self._last is None or (self._version[rows] != versions[rows]).any() or not np.array_equal(self._last[0], rows):
            self._order.full[rows] = (context - 1) // self._span
            self._place(rows, versions)
            self._last = rows.copy(), self._chosen(rows)
        self._seen[rows] = self._step
        return self._last[1]

    def _place(self, rows: Words, versions: NDArray[np.int64]) -> None:
        """Gives every row its place. A row whose table was changed loses it at once: what the order says of it is no longer true."""
        gone = (self._seen > 0) & ((self._version != versions) | (self._seen < self._step - FORGET))
        self._seen[gone] = 0
        if gone.any():
            self._order.keep(~gone[self._order.rows])
        new = rows[self._seen[rows] == 0]
        for row in new.tolist():
            self._order.add(row)
        self._version[new] = versions[new]

    def _chosen(self, rows: Words) -> SharedKeys:
        place = np.full(len(self._seen), -1, np.int64)
        place[rows] = np.arange(len(rows))
        places = place[self._order.rows]
        alike = self._order.among(places >= 0)
        return choose_nodes(places[places >= 0], alike * self._span, self.cost) if alike.any() else NOTHING


@dataclass(slots=True)
class _Beginning:
    """Rows [low, high) of an order that have `depth` keys in common."""

    depth: int
    low: int
    high: int = 0
    readers: int = 0  # that read the last of these keys, if they are not read together: rows, or nodes behind this one


def choose_nodes(rows: NDArray[np.int64], alike: NDArray[np.int64], cost: ReadCost) -> SharedKeys:
    """Returns the nodes worth it, of rows in the order of their beginnings. `alike`: keys in common with the row before; 0 of the first

    A beginning is worth it if the keys that need not be read again outweigh what a node costs. Whether those inside of it are is decided
    before, by what they add to it; then from the outside in, a beginning also gets the keys of those around it that were not worth it.
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
    """Yields every beginning that some rows have in common, those inside another before it."""
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
