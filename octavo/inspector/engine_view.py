"""The view: the state of pool and scheduler, collected while a client watches.

    kv.on_seal ────────┐   always: nothing else knows the content of a cached block
    core.traces ───────┤   always: the figures of each step, for timelines that are opened later (StepLog)
    pool.on_event ─────┤
    pins.on_change ────┤
    scheduler.on_end ──┴─► EngineView ──► a Watcher for each client that asked ──► ViewFrame, when it asks

A client requests every frame, so a slow client gets fewer. Between two frames of a client, the loop works a hundred times as long as
it takes to collect one, so watching costs a hundredth, however much there is to see. An error in here never stops the engine: the view
is switched off, and its watchers are informed.
"""

import time
from collections.abc import Callable
from typing import Literal

from octavo.inspector.frames import EventWords, ViewFrame, Wanted
from octavo.inspector.watcher import Contents, StepLog, Watcher
from octavo.log import logger
from octavo.messages import Ending, StepPlan
from octavo.policy.block_pool import BlockKey, Event
from octavo.policy.request import Sequence
from octavo.policy.scheduler import Scheduler

WORK_FOR_A_FRAME = 100  # times as long as the frame takes
LONGEST_PAUSE = 1.0
FAILED = "the inspector failed and is switched off until the engine is started again; the log says why"


class NoView:
    """A view that cannot be watched."""

    def request(self, client: str, wanted: Wanted) -> None:
        pass

    def frames(self, busy: bool) -> list[tuple[str, ViewFrame]]:
        return []


class EngineView:
    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        """It must also follow the steps: see `traces` of `EngineCore`."""
        self._scheduler = scheduler
        self._clock, self._start = clock, clock()
        self._started = time.time()
        self._watchers: dict[str, Watcher] = {}  # by client
        self._is_attached = False  # to the hooks, while there are watchers
        self._is_off = False  # it failed
        self._uninformed: set[str] = set()  # clients that wait for a frame and must be informed of the failure
        kv = self._scheduler.kv
        self._on_event, self._on_end, self._on_seal = kv.pool.on_event, self._scheduler.on_end, kv.on_seal
        self._on_pin = self._scheduler.pins.on_change
        self._contents = Contents(kv.pool, kv.spans, clock)
        self._steps = StepLog()
        self._seen = self._counts()
        kv.on_seal = self._on_sealed

    def request(self, client: str, wanted: Wanted) -> None:
        self._try(self._request, client, wanted)
        if self._is_off and wanted != "none":
            self._uninformed.add(client)

    def _request(self, client: str, wanted: Wanted) -> None:
        if wanted == "full":
            if not self._watchers:
                self._attach()
            self._watchers[client] = Watcher(self._scheduler, self._contents, self._steps, self._start, self._watched_from)
        elif wanted == "none":
            self._leave(client)
        elif client in self._watchers:
            self._watchers[client].wants = True

    def frames(self, busy: bool) -> list[tuple[str, ViewFrame]]:
        """Sends frames to the clients that requested one, if there are updates. `busy`: another opportunity follows soon."""
        found: list[tuple[str, ViewFrame]] = []
        if self._watchers:
            self._try(self._gather, busy, found)
        if self._uninformed:
            found += [(client, ViewFrame(True, self._now(), self._started, error=FAILED)) for client in self._uninformed]
            self._uninformed.clear()
        return found

    def _gather(self, busy: bool, found: list[tuple[str, ViewFrame]]) -> None:
        start = self._clock()
        for client, watcher in self._watchers.items():
            if not watcher.wants or (busy and start < watcher.due):
                continue
            frame = watcher.frame(self._now(), self._started)
            start, began = self._clock(), start
            if frame is not None:
                watcher.wants = False
                watcher.due = start + min((start - began) * WORK_FOR_A_FRAME, LONGEST_PAUSE)
                found.append((client, frame))

    def _try(self, work: Callable[..., None], *arguments: object) -> None:
        """Runs some work of the view. An error turns the view off, and the engine continues."""
        if self._is_off:
            return
        try:
            work(*arguments)
        except Exception as error:
            logger.error("the inspector failed and is switched off; the engine goes on", exc_info=error)
            self._is_off = True
            self._uninformed |= {client for client, watcher in self._watchers.items() if watcher.wants}
            self._scheduler.kv.on_seal = self._on_seal
            if self._is_attached:
                self._detach()
            self._watchers.clear()

    def _leave(self, client: str) -> None:
        if self._watchers.pop(client, None) is not None and not self._watchers:
            self._detach()

    def _now(self) -> float:
        return round(self._clock() - self._start, 4)

    # --- the hooks ---------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        pool, scheduler = self._scheduler.kv.pool, self._scheduler
        self._watched_from = self._clock()
        self._on_event, self._on_end = pool.on_event, scheduler.on_end
        self._preemptions = {seq.seq_id: seq.preemptions for seq in scheduler.waiting if seq.preemptions}
        self._is_attached = True
        pool.on_event, scheduler.on_end, scheduler.pins.on_change = self._on_block, self._on_sequence_end, self._on_pin_change

    def _detach(self) -> None:
        self._is_attached = False
        self._scheduler.kv.pool.on_event, self._scheduler.on_end = self._on_event, self._on_end
        self._scheduler.pins.on_change = self._on_pin

    def _on_sealed(self, seq: Sequence, group: int, first: int, end: int) -> None:
        self._on_seal(seq, group, first, end)
        self._try(self._contents.remember, seq, group, first, end)

    def _on_block(self, event: Event, block: int, key: BlockKey | None) -> None:
        self._on_event(event, block, key)
        self._try(self._note_block, event, block, key)

    def _note_block(self, event: Event, block: int, key: BlockKey | None) -> None:
        for watcher in self._watchers.values():
            watcher.on_block(event, block)
        if event == "take":
            self._contents.since[block] = self._clock()
        elif event == "evict":
            assert key is not None
            self._add_event((self._scheduler.step, self._now(), "evict", block, key[1][:8].hex()))

    def _on_pin_change(self, what: Literal["pin", "unpin"], num_blocks: int, num_tokens: int) -> None:
        self._on_pin(what, num_blocks, num_tokens)
        self._try(self._add_event, (self._scheduler.step, self._now(), what, num_blocks, num_tokens))

    def _on_sequence_end(self, seq: Sequence, reason: Ending) -> None:
        self._on_end(seq, reason)
        self._try(self._note_end, seq, reason)

    def _note_end(self, seq: Sequence, reason: Ending) -> None:
        for watcher in self._watchers.values():
            watcher.on_end(seq, reason)

    def begin(self) -> None:
        self._began = self._clock()

    def mark(self, name: str) -> None:
        pass

    def end(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._try(self._note_step, plan, scheduler)

    def _note_step(self, plan: StepPlan, scheduler: Scheduler) -> None:
        now, pool = self._clock(), scheduler.kv.pool
        at = round(now - self._start, 4)
        tokens = sum(plan.num_query)
        if tokens == len(plan.row):  # one token each, as in most steps
            decoding = sum(plan.outputs)
        else:
            decoding = sum(count for count, outputs in zip(plan.num_query, plan.outputs) if count == outputs)
        seen, self._seen = self._seen, self._counts()
        preempted, hits, queries = (new - old for new, old in zip(self._seen, seen))
        numbers = (
            plan.step, at, round(1000 * (now - self._began), 3), tokens - decoding, decoding, len(plan.row),
            len(scheduler.running), len(scheduler.waiting), pool.num_blocks - 1 - pool.num_free, preempted, hits, queries,
        )  # fmt: skip
        self._steps.add(numbers)
        if not self._watchers:
            return
        for words in (*self._preempted(preempted), *_events_of(plan, scheduler)):
            self._add_event((plan.step, at, *words))
        for watcher in self._watchers.values():
            watcher.add_step(numbers)

    def _counts(self) -> tuple[int, int, int]:
        stats = self._scheduler.stats
        return stats.preemptions, stats.prefix_hits, stats.prefix_queries

    def rest(self, scheduler: Scheduler) -> None:
        pass

    def close(self) -> None:
        pass

    def _add_event(self, event: EventWords) -> None:
        for watcher in self._watchers.values():
            watcher.add_event(event)

    def _preempted(self, count: int) -> list[EventWords]:
        if not count:
            return []
        now = {seq.seq_id: seq.preemptions for seq in self._scheduler.waiting if seq.preemptions}
        before, self._preemptions = self._preemptions, now
        return [("preempt", seq_id) for seq_id, times in now.items() if times > before.get(seq_id, 0)]


def _events_of(plan: StepPlan, scheduler: Scheduler) -> list[EventWords]:
    """Returns the events of a plan: admissions with a prefix hit, forks, block copies. Most steps have none."""
    if not (plan.row_writes or plan.row_forks or plan.copies):
        return []
    events: list[EventWords] = []
    running = {seq.seq_id: seq for seq in scheduler.running}
    of_row = {seq.row: seq.seq_id for seq in scheduler.running} | dict(zip(plan.row, plan.seq_id))
    for write in plan.row_writes:
        events.append(("admit", write.seq_id))
        if write.start:
            seq = running.get(write.seq_id)  # unless it has ended in its first step
            first = seq is not None and not seq.preemptions
            events.append(("hit", write.seq_id, write.start, (seq.request.life.hit_reason or "") if seq is not None and first else ""))
    events += [("fork", of_row[fork.source], fork.seq_id) for fork in plan.row_forks if not fork.moves and fork.source in of_row]
    row_of = {block: row for row, _, _, block in plan.new_blocks} if plan.copies else {}
    events += [("copy", source, copy, of_row[row_of[copy]]) for source, copy in plan.copies]
    return events
