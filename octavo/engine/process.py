"""The engine process: it builds an engine, then receives messages, runs steps and sends updates, until its parent ends it.

    stdin     its configuration, a line of JSON; when the parent ends, stdin closes and the process ends too
    stdout    why it could not start, a line of JSON
    stderr    the log
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from octavo import errors, log
from octavo.child import die_with
from octavo.config import EngineConfig, debug_from_environment
from octavo.engine.build import Share, build_engine
from octavo.engine.core import EngineCore
from octavo.engine.router import BROKEN, LoopStatus, Router
from octavo.engine.routing import CacheUpdates
from octavo.engine.stall_watch import StallWatch
from octavo.engine.trace import numbered
from octavo.engine.wire import Abort, Cached, Command, Gone, Met, Pinned, Refused, ResetPrefixCache, Unpin, Watching, frame_limit
from octavo.errors import ConfigError, EngineError, LoadError, OctavoError, RequestError
from octavo.inspector.engine_view import EngineView, NoView
from octavo.loading.resolve import ModelSource, load_model_config
from octavo.loading.text_side import load_tokenizer
from octavo.log import logger
from octavo.messages import AddRequest, Delta, EngineFacts, SchedulerStats
from octavo.worker.device import take_gpus
from octavo.worker.faults import Faults
from octavo.worker.machine import allowed_cpus, keep_to, share_of_cpus

START_FAILED = 1  # exit code, with the reason on stdout
CACHE_SECONDS = 0.1  # between two messages about the cache and pin hits while the loop is busy
SWITCH_SECONDS = 0.0005  # how long the loop may keep the interpreter from the router's thread


class SpawnConfig(Struct, frozen=True):
    """The configuration of an engine process."""

    config: EngineConfig
    path: str  # of the model, resolved by the parent
    kind: Literal["folder", "gguf"]
    name: str
    end_ids: tuple[int, ...]
    address: str
    epoch: int
    max_queue: int
    queue_timeout: float | None
    log_level: str
    log_format: str
    step_seconds: float
    inspector: bool  # the view may be watched
    engines: int = 1  # engines of the server
    number: int = 0  # number of this engine
    on_host: int = 1  # engines on this engine's host, which share its cores
    place: int = 0  # index of this engine among them
    memory_share: int = 1  # engines among which the memory that is free now is divided
    digest_key: bytes = b""  # key of the block digests, the same for all engines
    weights: bytes = b""  # identifies the weights that the first engine loaded; empty: this is the first
    far: bool = False  # clients are on another host
    clock_ahead: float = 0.0  # seconds by which the clients' clock is ahead of this host's
    silent: bool = False  # the previous engine was ended because its heartbeats stopped

    @property
    def is_on_ray(self) -> bool:
        """Returns whether the engine runs on a node of a Ray cluster. With a single engine, only its ranks do."""
        return self.engines > 1 and self.config.distributed_executor_backend == "ray"


class Reason(Struct, frozen=True):
    """The reason why an engine did not start."""

    kind: str  # class of the error
    message: str

    def error(self, who: str = "") -> OctavoError:
        """Returns the error for the user. `who`: the engine's name, if the message needs one."""
        kind = getattr(errors, self.kind, EngineError)
        return (kind if kind in (ConfigError, LoadError) else EngineError)(f"{who}: {self.message}" if who else self.message)


class Loop:
    """The loop of the engine process: takes commands between steps, and sends updates."""

    def __init__(
        self, core: EngineCore, router: Router, queue_timeout: float | None, view: EngineView | NoView, step_seconds: float,
        cache_updates: CacheUpdates | None = None,
    ) -> None:  # fmt: skip
        """`cache_updates`: cache updates for clients that choose between several engines."""
        self._core = core
        self._router = router
        self._queue_timeout = queue_timeout
        self._step_seconds = step_seconds
        self._next_step = 0.0  # the next step starts no earlier
        self._view = view
        self._cache_updates = cache_updates
        self._cache_sent_at = 0.0
        self._pins_sent = 0, 0  # their version and number of hits
        self._taken = 0
        self._log = StatsLog(core.scheduler.snapshot())

    def run(self, watch: StallWatch | None) -> None:
        while True:
            if watch is not None:
                watch.begin()
            self.turn()
            if watch is not None:
                watch.end()

    def turn(self) -> None:
        """Waits if there is nothing to do; otherwise runs one step."""
        core, scheduler = self._core, self._core.scheduler
        self._keep_pace()
        idle = not core.has_work
        waits = idle and not (self._cache_updates is not None and self._cache_updates.is_behind)
        seconds = scheduler.pins.seconds_left() if scheduler.kv.pool.pinned else None
        refused = [refusal for command in self._router.take(waits, seconds) if (refusal := self._obey(command))]
        if scheduler.kv.pool.pinned:
            scheduler.pins.expire()
        self._router.publish(self.status(busy=True))
        if idle and core.has_work:
            self._router.show(self._view.frames(busy=False))  # the step may be long, and nothing can be sent before its end
        deltas = self._step() if core.has_work else []
        if self._queue_timeout is not None:
            deltas += scheduler.expire(self._queue_timeout)
        status = self.status(core.has_work)
        self._router.publish(status)
        self._inform_clients(status)  # before the ends of the requests that the update is about
        self._router.give(_settled(deltas), refused, status.stats)
        self._router.show(self._view.frames(status.busy))
        self._log.turn(status.stats)

    def _inform_clients(self, status: LoopStatus) -> None:
        """Sends clients the cache updates, at intervals and before the loop waits, and changes of pinned prefixes at once.

        A new client gets a part of what is cached in each turn.
        """
        pins, sent = self._core.scheduler.pins, self._pins_sent
        due = not status.busy or status.at >= self._cache_sent_at + CACHE_SECONDS
        if pins.version != sent[0] or (due and status.stats.pin_hits != sent[1]):
            self._pins_sent = pins.version, status.stats.pin_hits
            self._router.send(Pinned(pins.states()))
        if self._cache_updates is not None and (part := self._cache_updates.next_part()) is not None:
            self._router.send(Cached(part[1]), part[0])
        if not due:
            return
        self._cache_sent_at = status.at
        if self._cache_updates is not None and (change := self._cache_updates.take()) is not None:
            self._router.send(Cached(change))

    def _keep_pace(self) -> None:
        """Waits before commands are taken rather than after, so that a watcher who connects meanwhile sees every step."""
        if self._step_seconds and self._core.has_work:
            time.sleep(max(0.0, self._next_step - time.monotonic()))

    def _step(self) -> list[Delta]:
        self._next_step = time.monotonic() + self._step_seconds
        return self._core.step()

    def status(self, busy: bool) -> LoopStatus:
        scheduler = self._core.scheduler
        return LoopStatus(time.monotonic(), busy, scheduler.step, self._taken, len(scheduler.rows.free), scheduler.snapshot())

    def _obey(self, command: Command) -> Refused | None:
        core = self._core
        if isinstance(command, AddRequest):
            self._taken += 1
            try:
                core.add(command)
            except RequestError as error:
                return Refused(command.request_id, "request", str(error), error.param, error.code)
        elif isinstance(command, Abort):
            core.abort(command.request_id, command.index)
        elif isinstance(command, ResetPrefixCache):
            core.scheduler.kv.forget()
        elif isinstance(command, Unpin):
            core.unpin(command.pin_id)
        elif isinstance(command, Gone):
            for request_id in [each for each in core.scheduler.requests if each.startswith(f"{command.name}-")]:
                core.abort(request_id)
            self._view.request(command.name, "none")
            if self._cache_updates is not None:
                self._cache_updates.drop(command.name)
        elif isinstance(command, Met):
            self._router.send(Pinned(core.scheduler.pins.states()), command.name)
            if self._cache_updates is not None:
                self._cache_updates.add(command.name)
        elif isinstance(command, Watching):
            self._view.request(command.name, command.wanted)
        return None


def _settled(deltas: list[Delta]) -> list[Delta]:
    """Returns deltas with copies of the records: the engine keeps writing to them, and the router's thread reads them later."""
    for delta in deltas:
        if delta.life is not None:
            delta.life = copy(delta.life)
    return deltas


def serve(spawn: SpawnConfig) -> None:
    """Runs forever. Raises if the engine cannot start or continue."""
    debug = debug_from_environment()
    source = ModelSource(Path(spawn.path), spawn.kind, spawn.name, spawn.config.hf_overrides)
    model = replace(load_model_config(source), eos_token_ids=spawn.end_ids)
    limit = frame_limit(spawn.config, model)
    router = Router(spawn.address, spawn.epoch, spawn.max_queue, limit, Faults.of(debug), lifeline=sys.stdin.fileno(), far=spawn.far)
    router.start()
    tokenizer = None if spawn.config.skip_tokenizer_init else partial(load_tokenizer, source)
    share = Share(spawn.memory_share, spawn.digest_key, spawn.weights, spawn.clock_ahead)
    config = spawn.config
    if config.trace is not None and spawn.engines > 1:
        config = replace(config, trace=numbered(config.trace, spawn.number))
    core = build_engine(config, source, model, debug, tokenizer, spawn.epoch, on_lost=_end, share=share)
    view: EngineView | NoView = NoView()
    if spawn.inspector:
        view = EngineView(core.scheduler)
        core.traces.append(view)
    kv = core.scheduler.kv
    cache_updates = CacheUpdates(kv.pool) if spawn.engines > 1 else None
    loop = Loop(core, router, spawn.queue_timeout, view, spawn.step_seconds, cache_updates)
    limits, digests = core.scheduler.limits, kv.digests
    facts = EngineFacts(
        source.name, spawn.epoch, limits, core.roster.facts, digests.key, digests.identity, core.weights, kv.keeps_states
    )
    router.ready(facts, loop.status(busy=False), core.roster.numbers)
    gc.freeze()  # what is allocated now stays, so the collector need not visit it again
    try:
        loop.run(StallWatch("the engine's loop", debug.step_slow).start() if debug.step_slow else None)
    except Exception as error:
        raise LoopBroke from error


def _end(error: OctavoError) -> None:
    """Ends the process at once, even while its loop waits for requests. The supervisor starts another one."""
    log.logger.error("the engine cannot go on: %s", error)
    os._exit(BROKEN)


class LoopBroke(Exception):
    """The engine had started and cannot continue."""


def main(parent: int) -> None:
    run_child(parent, _serve_on_share)


def _serve_on_share(spawn: SpawnConfig) -> None:
    """Runs on this engine's share of the cores and GPUs, if other engines have the rest. Ray assigns GPUs itself."""
    if spawn.on_host > 1:
        keep_to(share_of_cpus(spawn.place, spawn.on_host, allowed_cpus()))
    if spawn.engines > 1 and not spawn.far and spawn.config.device != "cpu":
        take_gpus(spawn.number, spawn.engines, spawn.config.num_ranks)
    serve(spawn)


def run_child(parent: int, work: Callable[[SpawnConfig], None]) -> None:
    """Runs a process that has its configuration from `parent`, and reports why it ended. Does not return."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a server; the parent decides what they mean
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that output of libraries is not taken for the reason
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        spawn = msgspec.json.decode(sys.stdin.buffer.readline(), type=SpawnConfig)
        log.setup(spawn.log_level, spawn.log_format, spawn.number if spawn.engines > 1 else None)
        work(spawn)
    except LoopBroke as error:
        log.logger.error("the engine failed", exc_info=error.__cause__)
        code = BROKEN
    except (OctavoError, MemoryError, OSError) as error:
        os.write(answers, msgspec.json.encode(Reason(type(error).__name__, str(error) or type(error).__name__)))
        code = START_FAILED
    except BaseException as error:
        log.logger.error("the engine could not be built", exc_info=error)
        os.write(answers, msgspec.json.encode(Reason(type(error).__name__, f"{type(error).__name__}: {error}")))
        code = START_FAILED
    os._exit(code)  # at once, whatever other threads do


# -- the log line of a busy engine, every ten seconds: what it did since the last line, and its state

STATS_SECONDS = 10.0


class StatsLog:
    def __init__(self, stats: SchedulerStats, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged, self._logged_at = copy(stats), clock()

    def turn(self, stats: SchedulerStats) -> None:
        """Logs if it is time. Called between steps, and when the engine has work again."""
        now = self._clock()
        if now - self._logged_at < STATS_SECONDS:
            return
        if stats.generation_tokens + stats.prompt_tokens > self._logged.generation_tokens + self._logged.prompt_tokens:
            logger.info(_line(self._logged, stats, now - self._logged_at))
        self._logged, self._logged_at = copy(stats), now


def _line(before: SchedulerStats, now: SchedulerStats, seconds: float) -> str:
    usable = now.num_blocks - 1  # block 0 is the null block
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    return (
        f"Avg prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, Preemptions: {now.preemptions - before.preemptions}, "
        f"KV cache usage: {100 * (usable - now.free_blocks) / usable:.1f}%, "
        f"Prefix cache hit rate: {100 * hits / queries if queries else 0:.1f}%"
    )
