"""`Replica`: one engine as an API process knows it: its state and numbers, its link, and its supervisor if this process has it.

    loading ──► ready ──► dead ──► ready ...        the supervisor restarts it
                  └──► draining ──► dead            it gets no new requests, because it is to be replaced

Its messages go to the `Door`, which has the requests of all replicas.
"""

import asyncio
import time
from dataclasses import replace
from typing import Literal, Protocol

from octavo.engine.link import Link, ViewStream
from octavo.engine.process import Orders
from octavo.engine.router import BEAT_SECONDS
from octavo.engine.supervisor import Serving, Supervisor
from octavo.engine.wire import Beat, Cached, Down, Drain, Hello, News, Pinned, Refused, View
from octavo.errors import OctavoError
from octavo.messages import EngineFacts, PinState, RankNumbers, SchedulerStats

State = Literal["loading", "ready", "draining", "dead"]
RETRY_SECONDS = 1.0  # `Retry-After` of a client
NOTHING = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0)


class Door(Protocol):
    """The receiver of a replica's messages."""

    def on_ready(self, replica: "Replica") -> None: ...

    def on_news(self, replica: "Replica", news: News) -> None: ...

    def on_refused(self, refused: Refused) -> None: ...

    def on_cached(self, replica: "Replica", cached: Cached) -> None: ...

    def on_down(self, replica: "Replica", reason: str) -> None:
        """Called when the engine is dead. Its requests get no more updates."""

    def on_lost(self, replica: "Replica") -> None:
        """Called when a message was lost, so that the engine's requests are no longer reliable."""

    def on_stays_dead(self, replica: "Replica", error: OctavoError) -> None:
        """Called when no other engine will start."""


class Replica:
    def __init__(self, number: int, address: str, name: str, door: Door, serving: Serving, frame_limit: int) -> None:
        """`name`: this process's name, the prefix of the ids of its requests."""
        self.number = number
        self.address = address
        self.state: State = "loading"
        self.stats = NOTHING  # since the server's start; they continue over restarts of the engine
        self.ranks: list[RankNumbers] = []  # if there are several
        self.facts: EngineFacts | None = None  # set when it is first ready
        self.pins: dict[str, PinState] | None = None  # by id; None: not reported yet
        self.pins_before: dict[str, PinState] = {}  # of the previous engine
        self.stays_dead = False  # no other engine will start
        self._door, self._serving = door, serving
        self._link = Link(address, name, self, frame_limit)
        self._before = NOTHING  # counts of earlier engines
        self._last_sign = self._stalled = 0.0
        self._supervisor: Supervisor | None = None
        self.view = ViewStream(self._link)

    def supervise(self, orders: Orders) -> None:
        """Starts the engine, which then belongs to this process. If it is already running, the configuration applies to its next start."""
        if self._supervisor is not None:
            self._supervisor.orders = orders
            return
        restarts = self._serving.restarts()
        self._supervisor = Supervisor(orders, restarts, self._on_start, self._on_down, self._on_stays_dead)

    @property
    def pid(self) -> int | None:
        """The id of the engine process, if this process supervises it."""
        return None if self._supervisor is None else self._supervisor.pid

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_there(self) -> bool:
        """Returns whether messages can be sent to it."""
        return self._link.epoch > 0

    @property
    def is_empty(self) -> bool:
        """Returns whether it has no requests of any process, as of its last heartbeat."""
        return self.stats.running + self.stats.waiting == 0

    def send(self, body: Down) -> None:
        self._link.send(body)

    async def replace(self, seconds: float) -> None:
        """Replaces the engine, and waits until the new one is ready. Open requests have `seconds` to end in the old one."""
        assert self._supervisor is not None
        self.state = "draining"
        self.send(Drain())
        deadline = time.monotonic() + seconds
        await asyncio.sleep(2 * BEAT_SECONDS)  # its next heartbeat informs other API processes
        while self.is_there and not self.is_empty and time.monotonic() < deadline:
            await asyncio.sleep(BEAT_SECONDS)
        if self.is_there:
            self._supervisor.replace()
        while not (self.is_ready or self.stays_dead):
            await asyncio.sleep(BEAT_SECONDS)

    def kill(self) -> None:
        """Kills the engine process. Another one is started at once; this does not count as a restart."""
        assert self._supervisor is not None
        self._supervisor.replace()

    async def close(self) -> None:
        self.state = "dead"
        self._link.close()
        if self._supervisor is not None:
            await self._supervisor.stop()

    # --- messages of the engine ------------------------------------------------------------------------------------------

    def on_hello(self, hello: Hello) -> None:
        if self.facts is not None and self.state != "dead":  # the death of the previous engine has not been noticed yet
            self._door.on_down(self, "there is a new one")
        self.facts = hello.facts
        self.pins, self.pins_before = None, self.pins or self.pins_before
        self._last_sign, self._stalled = time.monotonic(), 0.0
        self._before = self.stats
        self.state = "ready"
        self.view.begin_again()
        if self._supervisor is not None:
            self._supervisor.ready()
        self._door.on_ready(self)

    def on_news(self, news: News) -> None:
        self._hear(news.stats)
        self._door.on_news(self, news)

    def on_beat(self, beat: Beat) -> None:
        self._hear(beat.stats)
        self._stalled, self.ranks = beat.stalled, beat.ranks
        if beat.draining and self.state == "ready":
            self.state = "draining"

    def _hear(self, stats: SchedulerStats) -> None:
        self._last_sign = time.monotonic()
        self.stats = stats if self._before is NOTHING else stats.after(self._before)

    def on_refused(self, refused: Refused) -> None:
        self._door.on_refused(refused)

    def on_cached(self, cached: Cached) -> None:
        self._door.on_cached(self, cached)

    def on_pinned(self, pinned: Pinned) -> None:
        self.pins = {pin.pin_id: pin for pin in pinned.pins}

    def on_view(self, view: View) -> None:
        self.view.push(view.frame)

    def on_hangup(self) -> None:
        if self._supervisor is None and self.is_there:  # the supervising process knows the reason
            self._on_down("it hung up")

    def on_lost(self) -> None:
        self.view.begin_again()
        self._door.on_lost(self)

    # --- whether it is alive ---------------------------------------------------------------------------------------------

    def check(self, slept: float) -> None:
        """Sends a heartbeat, and ends an engine that is as good as dead. `slept`: seconds in which this process could not receive."""
        self._link.ping()
        self._last_sign += slept
        if self.is_there and (verdict := self._verdict(time.monotonic())):
            if self._supervisor is not None:
                self._supervisor.kill(verdict)
            else:
                self._on_down(verdict)

    def _verdict(self, now: float) -> str:
        """Returns why the engine is as good as dead, or nothing if it is not."""
        if self._supervisor is not None and self._supervisor.is_stopped:
            return "it was stopped"
        if now - self._last_sign > self._serving.beat_timeout:
            return f"it gave no sign of life for {self._serving.beat_timeout:g} s"
        if self._stalled > self._serving.hang_timeout:
            return f"a step took more than {self._serving.hang_timeout:g} s"
        return ""

    def _on_start(self, epoch: int) -> None:
        self._link.least_epoch = epoch

    def _on_down(self, reason: str) -> None:
        self._link.forget()
        self.view.begin_again()
        self.state = "dead"
        self.stats = replace(self.stats, running=0, waiting=0, free_blocks=self.stats.num_blocks - 1, pinned_blocks=0)
        self._door.on_down(self, reason)

    def _on_stays_dead(self, error: OctavoError) -> None:
        self.state, self.stays_dead = "dead", True
        self._door.on_stays_dead(self, error)
