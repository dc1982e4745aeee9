"""Rows read together what their tables have in common, whatever their order, and while rows come, fork, write and go."""

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch

from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.sampling_params import SamplingParams
from octavo.step.shared_keys import BEGIN, COUNT, END, FIRST, FREE, ReadCost, RowOrder, SharedKeys, SharedReads, choose_nodes
from octavo.step.step_tensors import RowLayout
from octavo.worker.request_table import RequestTable, TableChanges

NOISE = NoiseKey((0, 0), 0, 0)
SPAN = 4


def paths(keys: SharedKeys) -> dict[int, list[tuple[int, int]]]:
    """Keys that each row reads with others, in the order of the nodes."""
    found: dict[int, list[tuple[int, int]]] = {}
    for node in keys.nodes.tolist():
        for row in keys.rows[node[FIRST] : node[FIRST] + node[COUNT]].tolist():
            found.setdefault(row, []).append((node[BEGIN], node[END]))
    return found


def blocks_read(keys: SharedKeys, full: Sequence[int]) -> int:
    """By all rows, in nodes and for themselves; of those that no row writes to."""
    own = {row: parts[-1][1] // SPAN for row, parts in paths(keys).items()}
    together = sum(node[END] - node[BEGIN] for node in keys.nodes.tolist()) // SPAN
    return together + sum(count - own.get(row, 0) for row, count in enumerate(full))


def different_beginnings(tables: Iterable[Sequence[int]]) -> int:
    """Blocks that have to be read if each is read once for all rows that come to it by the same blocks. A null block is nobody's."""
    seen, alone = set(), 0
    for table in tables:
        own = list(table).index(0) if 0 in table else len(table)
        seen.update(tuple(table[: place + 1]) for place in range(own))
        alone += len(table) - own
    return len(seen) + alone


def check(keys: SharedKeys, tables: list[list[int]]) -> None:
    """`tables`: of each row, the blocks that it has filled"""
    for node in keys.nodes.tolist():
        rows = keys.rows[node[FIRST] : node[FIRST] + node[COUNT]].tolist()
        assert len(set(rows)) == len(rows) > 1
        shared = [tables[row][node[BEGIN] // SPAN : node[END] // SPAN] for row in rows]
        assert all(blocks == shared[0] and 0 not in blocks and len(blocks) * SPAN == node[END] - node[BEGIN] for blocks in shared)
    for parts in paths(keys).values():
        assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]


class Rows:
    """A request table whose rows come, fork, are written and go by plans, with blocks that are never used twice."""

    def __init__(self, draw: random.Random, kept: bool, count: int = 12, blocks: int = 10) -> None:
        """`kept`: the host has tables of its own, as it has beside a device"""
        self.draw, self.size, layout = draw, blocks, RowLayout(blocks, blocks * SPAN)
        self.table = RequestTable(count, layout, torch.device("cpu"))
        self.changes = TableChanges(None, count, layout) if kept else self.table.watched_tables()
        self.reads = SharedReads(self.changes.tables[0], SPAN, FREE)
        self.tables: dict[int, list[int]] = {}
        self._next = 1

    def apply(self, plan: StepPlan) -> None:
        self.table.apply(plan)
        if self.changes is not self.table.watched_tables():
            self.changes.apply(plan)

    def fresh(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def change(self) -> StepPlan:
        plan, draw, row = StepPlan(0), self.draw, self.draw.randrange(len(self.table.words))
        held = list(self.tables.values())
        kind = draw.choice(("write", "write", "fork", "append", "append", "copy", "give back", "leave"))
        if kind == "write":
            known = draw.choice(held) if held and draw.random() < 0.8 else []
            hit = known[: draw.randint(0, len(known))]
            self.tables[row] = hit + self.fresh(draw.randint(1, self.size - len(hit)) if len(hit) < self.size else 0)
            plan.row_writes = [RowWrite(row, 0, [1], 1, 0, [hit], SamplingParams(), (), [], NOISE, b"")]
            plan.new_blocks = [(row, 0, index, self.tables[row][index]) for index in range(len(hit), len(self.tables[row]))]
        elif kind == "fork" and self.tables:
            source = draw.choice(list(self.tables))
            plan.row_forks = [RowFork(row, source, 0, NOISE, False)]
            self.tables[row] = list(self.tables[source])
        elif kind == "leave":
            self.tables.pop(row, None)
        elif row in self.tables:
            mine = self.tables[row]
            index = {"append": len(mine), "copy": draw.randrange(len(mine)), "give back": mine.count(0)}[kind]
            if index < (self.size if kind == "append" else len(mine) - (kind == "give back")):
                block = 0 if kind == "give back" else self.fresh(1)[0]
                mine[index : index + (1 if kind == "give back" else self.size)] = [block]
                plan.new_blocks = [(row, 0, index, block)]
        return plan

    def copies(self, rows: list[int]) -> StepPlan:
        """What a plan does before rows write: who writes into a block that another has too gets one of its own."""
        plan = StepPlan(0)
        for row in rows:
            mine = self.tables[row]
            if sum(mine[-1] in table for table in self.tables.values()) > 1:
                mine[-1:] = self.fresh(1)
                plan.new_blocks.append((row, 0, len(mine) - 1, mine[-1]))
        return plan

    def step(self) -> None:
        rows = self.draw.sample(sorted(self.tables), self.draw.randint(0, len(self.tables)))
        if len(rows) < 2:
            return
        self.apply(self.copies(rows))
        context = [len(self.tables[row]) * SPAN - self.draw.randrange(SPAN) for row in rows]  # the last block is written to
        keys = self.reads.nodes(np.array(rows, np.int32), np.array(context, np.int32), self.changes.count[0])
        full = [self.tables[row][: (length - 1) // SPAN] for row, length in zip(rows, context)]
        check(keys, full)
        assert blocks_read(keys, list(map(len, full))) == different_beginnings(full)


# promise: shared-reads
@pytest.mark.parametrize("seed", range(40))
def test_every_block_is_read_once_while_rows_come_fork_write_and_go(seed: int) -> None:
    rows = Rows(random.Random(seed), kept=seed % 2 == 1)
    for _ in range(60):
        rows.apply(rows.change())
        rows.step()


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_come_together_are_ordered_as_if_one_came_after_the_other(seed: int) -> None:
    draw = random.Random(seed)
    rows, blocks, kinds = draw.choice([3, 12, 60]), draw.choice([1, 4, 20]), draw.choice([1, 2, 9])
    tables = np.array([[draw.randint(1, kinds) for _ in range(blocks)] for _ in range(rows)], np.int32)
    for row in range(1, rows):
        common = draw.randint(0, blocks)
        tables[row, :common] = tables[draw.randrange(row), :common]
        tables[row, draw.randrange(blocks)] *= draw.random() < 0.8
    together, alone = RowOrder(tables), RowOrder(tables)
    for _ in range(4):
        new = [row for row in range(rows) if row not in together.rows and draw.random() < 0.6]
        draw.shuffle(new)
        grown = [min(full + draw.randint(0, 3), blocks) for full in together.full.tolist()]
        together.full[:] = alone.full[:] = grown
        if new:
            together.add(np.array(new))
        for row in new:
            alone.add(np.array([row]))
        assert (together.rows.tolist(), together.alike.tolist()) == (alone.rows.tolist(), alone.alike.tolist())
        kept = np.array([draw.random() < 0.7 for _ in together.rows], bool)
        together.keep(kept)
        alone.keep(kept)


def chosen(rows: int, alike: list[int], cost: ReadCost) -> list[tuple[int, int, list[int]]]:
    keys = choose_nodes(np.arange(rows), np.array(alike), cost)
    return [(node[BEGIN], node[END], keys.rows[node[FIRST] : node[FIRST] + node[COUNT]].tolist()) for node in keys.nodes.tolist()]


def test_a_node_is_made_where_it_saves_more_than_it_costs() -> None:
    """Rows 0 to 3 share 16 keys, 0 and 1 share 100 more, 2 and 3 share 84 more."""
    alike = [0, 116, 16, 100]
    assert chosen(4, alike, FREE) == [(0, 16, [0, 1, 2, 3]), (16, 116, [0, 1]), (16, 100, [2, 3])]
    # 16 keys are saved by all four beside their nodes, 100 and 84 by the pairs. A pair that goes without what all share reads it too.
    assert chosen(4, alike, ReadCost(60, 10)) == [(0, 116, [0, 1]), (0, 100, [2, 3])]
    assert chosen(4, alike, ReadCost(95, 10)) == [(0, 116, [0, 1])]
    assert chosen(4, alike, ReadCost(200, 10)) == []
    # If no pair is worth a node, what all share is read by four rows, not by two nodes.
    assert chosen(4, [0, 20, 16, 20], ReadCost(10, 5)) == [(0, 16, [0, 1, 2, 3])]
