"""Frames of a view over a model pool: random, valid, of any size, and what a watcher has to know after each of them.

The model knows blocks, tables and who shares what; it is no engine. Sequences come (some with a hit), write, cross blocks,
fork, copy on write, are preempted, end; cached blocks are evicted when blocks are short. Frames say so in every way the
format allows: fields left out, tokens that come late, times that did not change.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

BLOCK_SIZE = 4
WORDS = ("the", " cat", " sat", "", " on", " émigré", "🙂", "\n", " a", "<b>")

Frame = dict[str, Any]
Known = dict[str, Any]  # what a watcher knows: the same shape as tests/web/data/history_script.js prints


@dataclass
class Block:
    ref: int = 0
    sealed: int = 0
    digest: str = ""
    tokens: list[str] = field(default_factory=list)
    since: float = 0.0
    told: list[str] | None = None  # the tokens a watcher knows
    told_since: float | None = None


@dataclass
class Sequence:
    seq: int
    request: str
    prompt: int
    tokens: int = 0
    state: str = "running"
    cached: int = 0
    reason: str = "cold"
    preemptions: int = 0
    table: list[int] = field(default_factory=list)
    told: int = 0  # entries of the table a watcher knows


class ViewModel:
    def __init__(self, seed: int, num_blocks: int, most_seqs: int = 6, before: "ViewModel | None" = None) -> None:
        """`before`: the engine that was there before this one was started. What is known counts times from the first one's start."""
        self.random = Random(seed)
        self.most_seqs = most_seqs
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free = list(range(1, num_blocks))  # the next to be taken last
        self.seqs: dict[int, Sequence] = {}
        self.now = 0.0
        self.step = 0
        self.arrivals = 0
        self.epoch, self.started, self.offset = 1, 1.5, 0.0
        self.own_steps: list[list[float]] = []
        self.own_events: list[list[Any]] = []
        self.steps_before: list[list[float]] = []
        self.events_before: list[list[Any]] = []
        if before is not None:
            self.epoch, self.offset = before.epoch + 1, before.offset + before.now + 2.75
            self.started += self.offset
            self.steps_before = before.steps_before + before.own_steps
            self.events_before = [*before.known_events(), [0, self.offset, "note", "the engine was started again"]]
        self.ended: list[tuple[Frame, str]] = []  # who was told to be gone: its last row, and how it ended
        self._start_frame()

    def _start_frame(self) -> None:
        self.changed: set[int] = set()
        self.touched: dict[int, int] = {}  # seq -> entries of its table that did not change
        self.gone: list[tuple[int, str]] = []
        self.last_rows: list[Frame] = []  # of those who are gone
        self.new_steps: list[list[float]] = []
        self.new_events: list[list[Any]] = []

    def head(self) -> Frame:
        return {"kind": "head", "version": 1, "model": "model", "block_size": BLOCK_SIZE, "num_blocks": len(self.blocks),
                "epoch": self.epoch, "started": self.started, "version_of": "octavo", "lesson": False}  # fmt: skip

    def frames(self, count: int) -> Iterator[tuple[Frame, Known]]:
        """A full frame and deltas; the head goes before them. With each, what is known after it."""
        for _ in range(self.random.randrange(20)):
            self.take_step()
        yield self.frame("full"), self.known()
        for _ in range(count):
            if self.random.random() < 0.05:
                scene = self.random.randrange(3)
                self.note = {"kind": "note", "at": self._later(0.05), "scene": scene, "of": 2, "title": f"Scene {scene}", "text": "Words."}
                yield self.note, self.known()
                continue
            for _ in range(self.random.choice((0, 1, 1, 1, 2, 5))):
                self.take_step()
            self._later(0.1)
            yield self.frame("delta"), self.known()

    note: Frame | None = None

    # What happens.

    def _later(self, seconds: float) -> float:
        self.now = round(self.now + self.random.choice((0, seconds, seconds)), 3)
        return self.now

    def event(self, *what: Any) -> None:
        self.new_events.append([self.step, self.now, *what])

    def take_step(self) -> None:
        self.step += 1
        self.now = round(self.now + self.random.choice((0.01, 0.02)), 3)
        before = sum(seq.tokens for seq in self.seqs.values())
        if len(self.seqs) < self.most_seqs and self.random.random() < 0.3:
            self.admit()
        for seq in list(self.seqs.values()):
            chance = self.random.random()
            if chance < 0.03:
                self.end(seq, self.random.choice(("stop", "length", "abort", "error")))
            elif chance < 0.06 and seq.state == "running":
                self.preempt(seq)
            elif chance < 0.09 and seq.state == "running" and len(self.seqs) < self.most_seqs:
                self.fork(seq)
            else:
                self.write(seq, self.random.choice((1, 1, 1, 7)))
        wrote = max(0, sum(seq.tokens for seq in self.seqs.values()) - before)
        used = sum(block.ref > 0 for block in self.blocks) if len(self.blocks) < 1000 else 0
        self.new_steps.append([self.step, self.now, 7.5, wrote, len(self.seqs), len(self.seqs), len(self.seqs), 0, used, 0, 0, wrote])

    def admit(self) -> Sequence:
        seq = Sequence(self.arrivals, f"cmpl-{self.arrivals}", self.random.randrange(1, 20))
        self.arrivals += 1
        self.seqs[seq.seq] = seq
        self.touched[seq.seq] = 0
        self.event("admit", seq.seq)
        cached = [block for block in self.free[:50] if self.blocks[block].sealed]
        if cached and self.random.random() < 0.5:
            hit = self.random.choice(cached)
            self.hold(hit)
            seq.table.append(hit)
            seq.tokens = seq.cached = BLOCK_SIZE
            seq.reason = "differs"
            self.event("hit", seq.seq, BLOCK_SIZE, "differs")
        return seq

    def hold(self, number: int) -> None:
        block = self.blocks[number]
        if block.ref == 0:
            self.free.remove(number)
        block.ref += 1
        self.changed.add(number)

    def release(self, number: int) -> None:
        block = self.blocks[number]
        block.ref -= 1
        self.changed.add(number)
        if block.ref == 0:
            self.free.insert(self.random.randrange(len(self.free) + 1) if len(self.free) < 100 else 0, number)
            if not block.sealed:
                self.clear(block)

    def clear(self, block: Block) -> None:
        block.sealed, block.digest, block.tokens, block.told, block.since = 0, "", [], None, self.now

    def take(self) -> int | None:
        if not self.free:
            return None
        number = self.free.pop()
        block = self.blocks[number]
        if block.sealed:
            self.event("evict", number, block.digest)
        self.clear(block)
        block.ref = 1
        self.changed.add(number)
        return number

    def writable(self, seq: Sequence) -> Block | None:
        """The block of the next position: taken, or copied where it is shared."""
        index = seq.tokens // BLOCK_SIZE
        if index == len(seq.table):
            number = self.take()
            if number is None:
                return None
            self.touched[seq.seq] = min(self.touched.get(seq.seq, index), index)
            seq.table.append(number)
        elif self.blocks[seq.table[index]].ref > 1:
            source = seq.table[index]
            number = self.take()
            if number is None:
                return None
            self.blocks[number].tokens = list(self.blocks[source].tokens)
            self.release(source)
            self.event("copy", source, number, seq.seq)
            self.touched[seq.seq] = min(self.touched.get(seq.seq, index), index)
            seq.table[index] = number
        return self.blocks[seq.table[index]]

    def write(self, seq: Sequence, count: int) -> None:
        for _ in range(count):
            block = self.writable(seq)
            if block is None:
                return self.preempt(seq) if seq.state == "running" else None
            seq.state = "running"
            block.tokens = [*block.tokens, self.random.choice(WORDS)]
            seq.tokens += 1
            number = seq.table[(seq.tokens - 1) // BLOCK_SIZE]
            self.changed.add(number)
            self.touched.setdefault(seq.seq, len(seq.table))
            if len(block.tokens) == BLOCK_SIZE:
                block.sealed, block.since, block.told = 1, self.now, None
                block.digest = f"{self.random.getrandbits(64):016x}"
        return None

    def preempt(self, seq: Sequence) -> None:
        self.event("preempt", seq.seq)
        self._drop_table(seq)
        seq.state = "waiting"
        seq.preemptions += 1

    def _drop_table(self, seq: Sequence) -> None:
        for number in reversed(seq.table):
            self.release(number)
        seq.table, seq.tokens = [], 0
        self.touched[seq.seq] = 0

    def fork(self, seq: Sequence) -> None:
        child = Sequence(self.arrivals, seq.request, seq.prompt, seq.tokens, table=list(seq.table))
        self.arrivals += 1
        self.seqs[child.seq] = child
        self.touched[child.seq] = 0
        for number in child.table:
            self.hold(number)
        self.event("fork", seq.seq, child.seq)

    def end(self, seq: Sequence, how: str) -> None:
        self.gone.append((seq.seq, how))
        digests = [self.blocks[number].digest for number in seq.table if self.blocks[number].sealed]
        self.last_rows.append(self._seq_row(seq, full=True) | {"digests": digests})
        self._drop_table(seq)
        del self.seqs[seq.seq]
        self.touched.pop(seq.seq)

    # What is told of it.

    def frame(self, kind: str) -> Frame:
        full = kind == "full"
        numbers = [n for n, b in enumerate(self.blocks) if n and (b.ref or b.sealed)] if full else sorted(self.changed)
        if full:
            self.last_rows = [row for row, _ in self.ended[-32:]] + self.last_rows
            self.gone = [(row["seq"], how) for row, how in self.ended[-32:]] + self.gone
            self.ended = []
            for block in self.blocks:  # whoever reads it forgets what was told
                block.told, block.told_since = None, None
        frame = {
            "kind": kind,
            "at": self.now,
            "blocks": [self._block_row(number, full) for number in numbers],
            "seqs": [*self.last_rows, *(self._seq_row(seq, full) for seq in self.seqs.values() if full or seq.seq in self.touched)],
            "gone": [list(end) for end in self.gone],
            "steps": (self.own_steps if full else []) + self.new_steps,
            "events": (self.own_events if full else []) + self.new_events,
            "lost": 0,
        }
        self.ended += [(row, how) for row, (_, how) in zip(self.last_rows, self.gone)]
        self.own_steps += self.new_steps
        self.own_events += self.new_events
        self._start_frame()
        return frame if full else {key: value for key, value in frame.items() if value or key == "at" or self.random.random() < 0.2}

    def _block_row(self, number: int, full: bool) -> list[Any]:
        block = self.blocks[number]
        tokens = None if not block.tokens or self.random.random() < 0.1 else list(block.tokens)
        if tokens is not None:
            block.told = tokens
        free = not block.ref and not block.sealed
        since = block.since if full or (block.since != block.told_since and not (free and self.random.random() < 0.5)) else None
        if since is not None:
            block.told_since = since
        return [number, block.ref, block.sealed, block.digest, tokens, since]

    def _seq_row(self, seq: Sequence, full: bool) -> Frame:
        start = 0 if full else min(self.touched[seq.seq], seq.told)
        seq.told = len(seq.table)
        return self._fields(seq) | {"from": start, "table": seq.table[start:]}

    def _fields(self, seq: Sequence) -> Frame:
        return {"seq": seq.seq, "request": seq.request, "sample": 0, "state": seq.state, "prompt": seq.prompt, "tokens": seq.tokens,
                "computed": max(0, seq.tokens - 1), "cached": seq.cached, "reason": seq.reason, "preemptions": seq.preemptions}  # fmt: skip

    def _entries(self, row: Frame) -> list[list[Any]]:
        """Of the table of one that has ended: index, block, whether its content is still there."""
        digests = row["digests"] + [None] * len(row["table"])
        return [[index, number, digests[index] == self.blocks[number].digest] for index, number in enumerate(row["table"])]

    def known_events(self) -> list[list[Any]]:
        """The last ones."""
        return (self.events_before + [[step, at + self.offset, *rest] for step, at, *rest in self.own_events[-30:]])[-30:]

    def known(self) -> Known:
        """All of it, where the pool is small enough to compare all."""
        small = self.blocks if len(self.blocks) < 1000 else []
        times = [0.0 if block.told_since is None else block.told_since + self.offset for block in small]
        blocks = [[block.ref, block.sealed, block.digest, block.told, since] for block, since in zip(small, times)]
        return {
            "at": self.now + self.offset,
            "blocks": blocks,
            "seqs": [self._fields(seq) | {"table": list(seq.table)} for seq in self.seqs.values()],
            "ended": [[row["seq"], how, self._entries(row)] for row, how in self.ended[-32:]],
            "owners": [sum(seq.table.count(number) for seq in self.seqs.values()) for number in range(len(blocks))],
            "steps": [step[0] for step in (self.steps_before + self.own_steps)[-600:]][::20],
            "events": self.known_events(),
            "note": self.note["title"] if self.note and self.note["scene"] else None,
        }
