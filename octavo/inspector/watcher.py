"""What an engine keeps for the view: the first two whether anybody watches or not, a `Watcher` for each client that does.

    Contents    the tokens of sealed blocks: nothing else knows the content of a cached block
    StepLog     the steps of the last ten minutes, so that a timeline does not begin when it is opened
    Watcher     what a client has received about the engine, and what it has not received yet

All of it is bounded, so a client that requests no frames costs no more memory.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from octavo.inspector.frames import BlockState, EventWords, SequenceState, StateNumbers, StepNumbers, ViewFrame
from octavo.messages import Ending
from octavo.policy.block_pool import NULL_BLOCK, BlockPool, Event
from octavo.policy.request import Sequence, Status
from octavo.policy.scheduler import Scheduler
from octavo.policy.states import States

KEPT_SECONDS = 600
ROWS_A_SECOND = 4  # of older steps
LATEST_STEPS = 600


class StepLog:
    """| older: one row for the steps of each quarter of a second | the latest 600 steps, one row each |

    It has at most 3,000 rows, some 700 KiB, however fast the steps are. A row of several steps has the form of a step's row: the number,
    the end and the gauges of the last one, and sums of what they did.
    """

    def __init__(self, rows: Iterable[StepNumbers] = ()) -> None:
        """`rows`: those of another log."""
        self._older: deque[list[Any]] = deque(maxlen=KEPT_SECONDS * ROWS_A_SECOND)
        self._end_of_last = 0.0  # when the quarter of a second of the last of them ends
        self._latest: deque[StepNumbers] = deque()
        for row in rows:
            self.add(row)

    def add(self, row: StepNumbers) -> None:
        self._latest.append(row)
        if len(self._latest) > LATEST_STEPS:
            self._add_older(self._latest.popleft())

    def rows(self, now: float) -> list[StepNumbers]:
        """Returns the rows of the last ten minutes, the oldest first."""
        first = now - KEPT_SECONDS
        older = [(*row[:2], round(row[2], 3), *row[3:]) for row in self._older if row[1] >= first]
        return [*older, *(row for row in self._latest if row[1] >= first)]

    def _add_older(self, row: StepNumbers) -> None:
        if row[1] >= self._end_of_last:
            self._older.append(list(row))
            self._end_of_last = (int(row[1] * ROWS_A_SECOND) + 1) / ROWS_A_SECOND
            return
        last = self._older[-1]  # changed in place: this is a part of every step
        last[0], last[1] = row[0], row[1]
        last[2] += row[2]
        last[3] += row[3]
        last[4] += row[4]
        last[5:9] = row[5:9]
        last[9] += row[9]
        last[10] += row[10]
        last[11] += row[11]


class Contents:
    """The tokens of sealed blocks, and since when."""

    def __init__(self, pool: BlockPool, spans: list[int], clock: Callable[[], float]) -> None:
        """`spans`: tokens in a block of each cache group."""
        self.spans = spans
        self.since = array("d", [0.0]) * pool.num_blocks  # by the clock
        self._room = max(spans)
        self._ids = array("i", [0]) * (pool.num_blocks * self._room)
        self._key_of = pool.key_of
        self._clock = clock

    def remember(self, seq: Sequence, group: int, first: int, end: int) -> None:
        span, now = self.spans[group], self._clock()
        for index in range(first, end):
            block = seq.tables[group][index]
            if self._key_of[block] is not None:  # otherwise it is a duplicate that stays with its sequence
                start = block * self._room
                self._ids[start : start + span] = seq.token_ids[index * span : (index + 1) * span]
                self.since[block] = now

    def of(self, block: int) -> list[int]:
        """Returns the tokens of a sealed block."""
        key = self._key_of[block]
        assert key is not None
        return self._ids[block * self._room : block * self._room + self.spans[key[0]]].tolist()


# -- one client
#
#     dirty     blocks that have changed since; sent in their present state, however often they changed
#     owed      blocks whose tokens must be sent: of sealed blocks from `Contents`, of others from the sequence that fills them
#     sent      sequences as they were sent; a frame has the differences
#     ended     sequences as they were when they ended, including those that were never sent
#     steps, events, ended     ring buffers: what does not fit is counted as lost
#
# The pool, the sequences and the ring buffers bound all of it. The size of a frame is bounded, too; the rest comes with the next frame.

MOST_STEPS = 600
MOST_EVENTS = 2048
MOST_ENDED = 256
ENDED_ENTRIES = 65_536  # of the tables of all ended sequences
BLOCKS_A_FRAME = 4096
TOKENS_A_FRAME = 1024  # blocks that are sent with their tokens
ASKED_TOKENS = 64  # of a waiting prompt

Place = tuple[Sequence, int, int]  # a block's sequence, cache group, and index in that table


@dataclass(slots=True)
class _Sent:
    seq: Sequence
    state: str
    tokens: int
    computed: int
    cached: int  # of its request, so it may change with another sample
    preemptions: int
    tables: list[list[int]]

    @staticmethod
    def of(seq: Sequence) -> "_Sent":
        cached, tables = seq.request.life.cached_tokens, [table.copy() for table in seq.tables]
        return _Sent(seq, seq.status.value, seq.num_tokens, seq.num_computed, cached, seq.preemptions, tables)

    def holds(self) -> bool:
        seq = self.seq
        return (
            self.computed == seq.num_computed and self.tokens == seq.num_tokens and self.state == seq.status.value
            and self.cached == seq.request.life.cached_tokens and self.preemptions == seq.preemptions and self.tables == seq.tables
        )  # fmt: skip

    def same_entries(self, seq: Sequence, group: int) -> int:
        """Returns how many first entries of a table are the same as before."""
        old, new = self.tables[group], seq.tables[group]
        if new[: len(old)] == old:
            return len(old)
        return next((at for at, (one, other) in enumerate(zip(old, new)) if one != other), min(len(old), len(new)))


def _state_of(seq: Sequence, start: int, states: States | None) -> SequenceState:
    """Returns the state of a sequence. `start`: the first entry of its first table to send. `states`: of a recurrent model"""
    request, life = seq.request, seq.request.life
    asked = None
    if seq.status is Status.WAITING:
        asked = list(seq.token_ids[max(0, request.num_prompt - ASKED_TOKENS) : request.num_prompt])
    return SequenceState(
        seq.seq_id, request.request_id, seq.index, request.num_samples, seq.status.value, request.num_prompt, seq.num_tokens, seq.limit,
        seq.num_computed, life.cached_tokens, life.hit_reason or "", seq.preemptions, start, seq.tables[0][start:], asked=asked,
        kept=None if states is None else states.kept_of(seq),
    )  # fmt: skip


class Watcher:
    def __init__(self, scheduler: Scheduler, contents: Contents, log: StepLog, start: float, watched_from: float) -> None:
        """`log`: the steps so far. Times are counted from `start`. Allocations of blocks are observed since `watched_from`."""
        self.wants = True  # it has requested a frame
        self.due = 0.0  # no frame is sent earlier
        self._scheduler, self._pool, self._states = scheduler, scheduler.kv.pool, scheduler.kv.states
        self._sent_states: StateNumbers | None = None
        self._contents, self._log, self._start, self._watched_from = contents, log, start, watched_from
        held = (block for seq in scheduler.running for table in seq.tables for block in table if block != NULL_BLOCK)
        self._owed: dict[int, Place | None] = dict.fromkeys(self._pool.index.values())  # its place in the sequence that fills it
        self._dirty = dict.fromkeys(chain(held, self._owed))
        self._sent: dict[int, _Sent] = {}
        self._steps: deque[StepNumbers] = deque(maxlen=MOST_STEPS)
        self._events: deque[EventWords] = deque(maxlen=MOST_EVENTS)
        self._ended: dict[int, tuple[SequenceState, str, list[bytes]]] = {}  # its last state, how it ended, digests of its full blocks
        self._ended_entries = 0
        self._lost = 0
        self._full = True  # its next frame is its first

    def on_block(self, event: Event, block: int) -> None:
        self._dirty[block] = None
        if event == "seal":
            self._owed[block] = None
        elif event == "release" and self._pool.ref[block] and self._pool.key_of[block] is None:
            self._owed[block] = None  # the sequence that left may have been further than those that share the block

    def on_end(self, seq: Sequence, reason: Ending) -> None:
        """Keeps the last state of a sequence whose blocks are about to be freed."""
        before = self._sent.get(seq.seq_id)
        start = 0 if before is None else before.same_entries(seq, 0)
        links = self._scheduler.kv.groups[0].links
        self._ended[seq.seq_id] = _state_of(seq, start, self._states), reason, seq.digests[links - 1 : seq.num_sealed : links]
        self._ended_entries += len(seq.tables[0])
        while len(self._ended) > MOST_ENDED or (self._ended_entries > ENDED_ENTRIES and len(self._ended) > 1):
            oldest, *_ = self._ended.pop(next(iter(self._ended)))
            self._ended_entries -= oldest.start + len(oldest.table)
            self._lost += 1

    def add_step(self, step: StepNumbers) -> None:
        self._lost += len(self._steps) == MOST_STEPS
        self._steps.append(step)

    def add_event(self, event: EventWords) -> None:
        self._lost += len(self._events) == MOST_EVENTS
        self._events.append(event)

    def frame(self, at: float, started: float) -> ViewFrame | None:
        """Returns a frame with the updates that fit, or None if there are none."""
        seqs, gone = self._sequences()
        blocks = self._blocks()
        steps = self._log.rows(at) if self._full else list(self._steps)
        events = list(self._events)
        states = None if self._states is None else _numbers_of(self._states)
        states, self._sent_states = None if states == self._sent_states else states, states
        if not (self._full or seqs or gone or blocks or steps or events or states):
            return None
        frame = ViewFrame(self._full, at, started, blocks, seqs, gone, steps, events, self._lost, states)
        self._steps.clear()
        self._events.clear()
        self._full, self._lost = False, 0
        return frame

    # --- sequences -------------------------------------------------------------------------------------------------------

    def _sequences(self) -> tuple[list[SequenceState], list[tuple[int, str]]]:
        sent, changed, live = self._sent, [], set()
        for seq in chain(self._scheduler.running, self._scheduler.waiting):
            live.add(seq.seq_id)
            before = sent.get(seq.seq_id)
            if before is None or not before.holds():
                changed.append(self._updated_state(seq, before))
        gone: dict[int, str] = {seq_id: sent.pop(seq_id).seq.ended or "abort" for seq_id in sent.keys() - live}
        for state, how, digests in self._ended.values():
            changed.append(replace(state, digests=[digest[:8].hex() for digest in digests]))
            gone[state.seq] = how
        self._ended.clear()
        self._ended_entries = 0
        return changed, list(gone.items())

    def _updated_state(self, seq: Sequence, before: _Sent | None) -> SequenceState:
        for group in range(len(seq.tables)):
            self._mark_table(seq, group, before)
        start = 0 if before is None else before.same_entries(seq, 0)
        self._sent[seq.seq_id] = _Sent.of(seq)
        return _state_of(seq, start, self._states)

    def _mark_table(self, seq: Sequence, group: int, before: _Sent | None) -> None:
        """Marks the blocks whose tokens differ from those that were sent."""
        table, first = seq.tables[group], 0
        if before is not None and before.preemptions == seq.preemptions:  # otherwise it was readmitted, with other blocks
            first = min(before.same_entries(seq, group), min(before.computed, seq.num_computed) // self._contents.spans[group])
        for index in range(first, len(table)):
            block = table[index]
            if block == NULL_BLOCK:
                continue
            self._dirty[block] = None
            if self._pool.key_of[block] is None:  # otherwise it became owed when it was sealed
                self._owed[block] = (seq, group, index)

    # --- blocks ----------------------------------------------------------------------------------------------------------

    def _blocks(self) -> list[BlockState]:
        dirty, owed = self._dirty, self._owed
        found = []
        for block in list(islice(owed, TOKENS_A_FRAME)):
            found.append(self._state(block, self._tokens(block, owed.pop(block))))
            dirty.pop(block, None)
        for block in list(islice(dirty, BLOCKS_A_FRAME - len(found))):
            del dirty[block]
            stale = block in owed and not self._full  # the tokens sent before may be those of another content
            found.append(self._state(block, [] if stale else None))
        return found

    def _state(self, block: int, ids: list[int] | None) -> BlockState:
        key, ref, since = self._pool.key_of[block], self._pool.ref[block], self._contents.since[block]
        if key is not None:
            return block, ref, 1 + self._pool.pinned[block], key[1][:8].hex(), ids, round(since - self._start, 4)
        return block, ref, 0, "", ids, round(since - self._start, 4) if ref and since >= self._watched_from else None

    def _tokens(self, block: int, place: Place | None) -> list[int]:
        if self._pool.key_of[block] is not None:
            return self._contents.of(block)
        if not self._pool.ref[block]:
            return []
        if place is None or self._pool.ref[block] > 1 or block not in place[0].tables[place[1]]:  # it is shared, or its place is unknown
            places = (place for seq in self._scheduler.running if (place := _place(seq, block)) is not None)
            place = max(places, key=lambda place: place[0].num_computed)
        seq, group, index = place
        span = self._contents.spans[group]
        return seq.token_ids[index * span : min((index + 1) * span, seq.num_computed)].tolist()


def _numbers_of(states: States) -> StateNumbers:
    """Returns how many state slots there are, and how many of them are live, checkpoints that are not pinned, and pinned ones."""
    pool = states.pool
    slots, pinned = pool.num_states - 1, len(pool.pinned)
    return slots, slots - len(pool.empty) - len(pool.index), len(pool.index) - pinned, pinned


def _place(seq: Sequence, block: int) -> Place | None:
    """Returns the place of a block in a sequence, or None if the sequence does not have it."""
    for group, table in enumerate(seq.tables):
        if block in table:
            return seq, group, table.index(block)
    return None
