"""The step trace: every step of an engine as slices, counters and marks for ui.perfetto.dev and chrome://tracing (`--trace FILE`).

    |------------------------ step ------------------------|      tokens, rows, how many of them decode
    |- schedule -|---- forward ----|- wait -|- update -|...|      host work in order; at depth 2 the result is that of the step before

If a model is split, each rank has a track below. Its steps are written up to a second late, with the times at which they ran.

The file is a JSON array of events without a closing bracket. Whole events are written, at least every half second while steps run and
whenever the engine becomes idle, so the file of a killed process can be loaded. It stops growing at MOST_BYTES.
"""

import os
import threading
import time
from pathlib import Path
from typing import Protocol

from octavo.log import logger
from octavo.messages import StepPlan
from octavo.own_file import open_own
from octavo.policy.scheduler import Scheduler
from octavo.worker.roster import Roster, Step

MOST_BYTES = 256 * 2**20  # about 300,000 steps
FLUSH_NS = 500_000_000
ENGINE_TRACK, FIRST_RANK_TRACK = 1, 2
HEAD = '[\n{"ph":"M","name":"process_name","pid":'


class Trace(Protocol):
    def begin(self) -> None:
        """Records the beginning of a step."""

    def mark(self, name: str) -> None:
        """Names the work since the last mark."""

    def end(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Records the end of a step."""

    def rest(self, scheduler: Scheduler) -> None:
        """Records that the engine is idle."""

    def close(self) -> None: ...


def numbered(path: str, engine: int) -> str:
    """Returns the file of one of several engines: steps-1.json for steps.json."""
    name = Path(path)
    return str(name.with_stem(f"{name.stem}-{engine}"))


class StepTrace:
    def __init__(self, path: str, goes_on: bool = False, most_bytes: int = MOST_BYTES) -> None:
        """`goes_on`: the file was begun by an engine that died. This engine gets a process of its own in it."""
        self._path = path
        self._pid = os.getpid()
        self._file = open_own("trace", path, "trace", HEAD.encode(), 0o644, goes_on)
        self._left = self._most_bytes = most_bytes
        self._events: list[str] = []  # not written yet
        self._written = time.monotonic_ns()
        self._times: list[tuple[str, int]] = []  # of the current step: what ended when
        self._preemptions = 0
        self._lock = threading.RLock()  # guards the unwritten events and the file: steps of ranks arrive in other threads
        head = (",\n" + HEAD[2:]) if goes_on else HEAD
        self._write(f'{head}{self._pid},"args":{{"name":"octavo engine"}}}}')

    def follow(self, roster: Roster) -> None:
        """Gives each rank a track, and writes the steps of its heartbeats there."""
        if roster.facts:
            self._name_track(ENGINE_TRACK, "engine")
            for one in roster.facts:
                self._name_track(FIRST_RANK_TRACK + one.rank, f"rank {one.rank}" + (f", stage {one.stage}" if one.stages > 1 else ""))
            roster.on_steps = self._note_rank

    def _name_track(self, track: int, name: str) -> None:
        for what, value in (("thread_name", f'"name":"{name}"'), ("thread_sort_index", f'"sort_index":{track}')):
            self._write(f',\n{{"ph":"M","name":"{what}","pid":{self._pid},"tid":{track},"args":{{{value}}}}}')

    def _note_rank(self, rank: int, steps: list[Step]) -> None:
        with self._lock:
            if self._left:
                for step, began, ended in steps:
                    self._slice("rank step", int(began * 1e9), int(ended * 1e9), f'"step":{step}', FIRST_RANK_TRACK + rank)
                self._flush(time.monotonic_ns())

    def begin(self) -> None:
        self._times = [("", time.monotonic_ns())]

    def mark(self, name: str) -> None:
        self._times.append((name, time.monotonic_ns()))

    def end(self, plan: StepPlan, scheduler: Scheduler) -> None:
        if not self._left:
            return
        start, now = self._times[0][1], time.monotonic_ns()
        decoding = [count for count, outputs in zip(plan.num_query, plan.outputs) if count == outputs]
        tokens = sum(plan.num_query)
        self._slice(
            "step", start, now,
            f'"step":{plan.step},"rows":{len(plan.row)},"tokens":{tokens},"prefill_tokens":{tokens - sum(decoding)},'
            f'"decode_rows":{len(decoding)},"admitted":{len(plan.row_writes)},"new_blocks":{len(plan.new_blocks)},"copies":{len(plan.copies)}',
        )  # fmt: skip
        for (_, began), (name, ended) in zip(self._times, self._times[1:]):
            self._slice(name, began, ended)
        self._count(now, scheduler)
        if (more := scheduler.stats.preemptions - self._preemptions) > 0:
            self._preemptions += more
            self._event("i", "preempted", start, f',"tid":{ENGINE_TRACK},"s":"p","args":{{"sequences":{more}}}')
        if now - self._written > FLUSH_NS or not scheduler.requests:
            self._flush(now)

    def rest(self, scheduler: Scheduler) -> None:
        if self._left:
            now = time.monotonic_ns()
            self._count(now, scheduler)
            self._flush(now)

    def close(self) -> None:
        """Closes the array. The file of a killed process lacks the bracket."""
        with self._lock:
            self._flush(time.monotonic_ns())
            self._write("\n]\n")
            self._left = 0
            os.close(self._file)

    def _slice(self, name: str, start: int, end: int, args: str = "", track: int = ENGINE_TRACK) -> None:
        self._event("X", name, start, f',"tid":{track},"dur":{(end - start) / 1000:.3f},"args":{{{args}}}')

    def _count(self, now: int, scheduler: Scheduler) -> None:
        pool = scheduler.kv.pool
        self._counter("requests", now, f'"running":{len(scheduler.running)},"waiting":{len(scheduler.waiting)}')
        self._counter("KV blocks", now, f'"in use":{pool.num_blocks - 1 - pool.num_free}')

    def _counter(self, name: str, at: int, args: str) -> None:
        self._event("C", name, at, f',"args":{{{args}}}')

    def _event(self, kind: str, name: str, at: int, rest: str) -> None:
        with self._lock:
            self._events.append(f',\n{{"ph":"{kind}","name":"{name}","pid":{self._pid},"ts":{at / 1000:.3f}{rest}}}')

    def _flush(self, now: int) -> None:
        with self._lock:
            self._written = now
            text, self._events = "".join(self._events), []
            if len(text) > self._left > 0:
                logger.warning("the trace %s is full, after some %d MiB: no more steps are written", self._path, self._most_bytes >> 20)
                self._left = 0
            self._write(text)

    def _write(self, text: str) -> None:
        """Writes whole events in one call. A full disk ends the trace, but no step."""
        if not text or len(text) > self._left:
            return
        self._left -= len(text)
        try:
            os.write(self._file, text.encode())
        except OSError as error:
            logger.warning("the trace %s cannot be written any more: %s", self._path, error.strerror)
            self._left = 0
