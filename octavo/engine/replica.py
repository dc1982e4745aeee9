"""`Replica`: one engine as an API process knows it: its socket, its state and numbers, and its supervisor if this process has it.

    loading ──► ready ──► dead ──► ready ...        the supervisor restarts it
                  └──► draining ──► dead            it gets no new requests, because it is to be replaced

Its `Link` sends and receives frames, and detects losses. Its messages go to the `Frontend`, which has the requests of all replicas.
"""

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import Literal, Protocol

import zmq

from octavo.engine import wire
from octavo.engine.process import SpawnConfig
from octavo.engine.router import BEAT_SECONDS
from octavo.engine.supervisor import Serving, Supervisor
from octavo.engine.wire import (
    Add,
    Cached,
    Down,
    DownFrame,
    Drain,
    Heartbeat,
    Hello,
    Lost,
    Ping,
    Pinned,
    Refused,
    Up,
    Updates,
    UpFrame,
    View,
    Watch,
)
from octavo.errors import OctavoError, RequestError, UnavailableError
from octavo.inspector.frames import ViewStream
from octavo.log import logger
from octavo.messages import EngineFacts, PinState, RankNumbers, SchedulerStats

State = Literal["loading", "ready", "draining", "dead"]
RETRY_SECONDS = 1.0  # `Retry-After` of a client
NOTHING = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0)

LAST_WORDS_MS = 200  # time that the last messages may take to be sent
SLICE_SECONDS, MOST_SLICE_SECONDS = 0.01, 0.05  # other tasks get their turn after this time
BURST_SECONDS = 0.002  # requests that arrive in a row are at most this far apart
MOST_WAIT_SECONDS = 0.05


class Frontend(Protocol):
    """The receiver of a replica's messages."""

    def on_ready(self, replica: "Replica") -> None: ...

    def on_updates(self, replica: "Replica", updates: Updates) -> None: ...

    def on_refused(self, refused: Refused) -> None: ...

    def on_cached(self, replica: "Replica", cached: Cached) -> None: ...

    def on_down(self, replica: "Replica", reason: str) -> None:
        """Called when the engine is dead. Its requests get no more updates."""

    def on_lost(self, replica: "Replica") -> None:
        """Called when a message was lost, so that the engine's requests are no longer reliable."""

    def on_stays_dead(self, replica: "Replica", error: OctavoError) -> None:
        """Called when no other engine will start."""


class Link:
    """The socket. Its descriptor is edge-triggered, and any call may consume its signal. So every look reads everything that has arrived,
    and every send is followed by a look.

    Updates wait while requests keep arriving, and after a look for as long as that look and the readers of its updates took, but never
    more than 50 ms. So requests that arrive together compute together, and streams take at most half of the event loop's time. A lone
    stream waits less than a millisecond. With hundreds of streams, the updates of several steps are read and written at once, which
    takes far less time than one after the other.
    """

    def __init__(self, address: str, name: str, replica: "Replica", frame_limit: int) -> None:
        """`name`: this process's name on the socket, and the prefix of every request id."""
        self.epoch = 0  # of the connected engine; 0: none
        self.least_epoch = 1  # an engine with a lower epoch is dead
        self._replica = replica
        self._frame_limit = frame_limit
        self._sent = self._received = 0
        self._looking = False
        self._looked = 0.0  # end of the last look
        self._added = self._rests_until = 0.0  # when the last request was sent; when the readers of the last updates will have rested
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        # no message waits for an engine that is absent; no message is dropped for one that is there
        for option, value in ((zmq.IMMEDIATE, 1), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, 50)):
            self._socket.setsockopt(option, value)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._loop.add_reader(self._socket.fileno(), self._on_signal)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.disable_monitor()
            self.forget()
            self._socket.close(linger=LAST_WORDS_MS)

    def forget(self) -> None:
        """Drops all messages that still arrive from a dead engine."""
        self.epoch = 0

    def ping(self) -> None:
        """Sends a heartbeat to the engine, and checks the engine's heartbeats. Called a few times a second."""
        with suppress(zmq.Again):
            while self._monitor.recv_multipart(zmq.NOBLOCK):
                self._replica.on_hangup()
        self._send(Ping(os.getpid()))

    def send(self, body: Down) -> None:
        if not self.epoch or not self._send(body):
            raise UnavailableError("the engine cannot be reached", retry_after=1)

    def _send(self, body: Down) -> bool:
        frame = wire.encode(DownFrame(self.epoch, self._sent + 1, body))
        if len(frame) > self._frame_limit:  # the engine would close the connection
            raise RequestError(f"the request takes {len(frame)} bytes, the most is {self._frame_limit}: shorten its stop strings and words")
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent += 1
        if isinstance(body, Add):
            self._added = time.monotonic()
        self._look()
        return True

    def _on_signal(self) -> None:
        self._socket.getsockopt(zmq.EVENTS)  # clears the signal, which would otherwise repeat until the next look
        self._look()

    def _look(self) -> None:
        """Schedules one look at the socket, however often it is called: reading may take a while."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._take_when_due, time.monotonic() + MOST_WAIT_SECONDS)

    def _take_when_due(self, latest: float) -> None:
        wait = min(max(self._rests_until, self._added + BURST_SECONDS), latest) - time.monotonic()
        if wait > 0:
            self._loop.call_later(wait, self._take_when_due, latest)
        else:
            self._take()

    def _rest(self, start: float) -> None:
        """Called when the readers that a look has woken are done."""
        now = time.monotonic()
        self._rests_until = now + (now - start)

    def _take(self) -> None:
        """Reads everything that has arrived, for as long as other tasks ran since the last look, so that updates cannot starve."""
        self._looking = False
        now = time.monotonic()
        end = now + min(max(now - self._looked, SLICE_SECONDS), MOST_SLICE_SECONDS)
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            frame = wire.decode_up(data)
            if frame is not None:
                self._receive(frame)
            if time.monotonic() > end:
                self._look()
                break
        self._looked = time.monotonic()
        self._loop.call_soon(self._rest, now)

    def _receive(self, frame: UpFrame) -> None:
        body = frame.body
        if isinstance(body, Hello) and frame.epoch > self.epoch and frame.epoch >= self.least_epoch:
            self.epoch, self._received = frame.epoch, frame.number
            self._replica.on_hello(body)
            return
        if frame.epoch != self.epoch:
            return  # sent by an engine that is dead
        expected, self._received = self._received + 1, frame.number
        if frame.number != expected:
            logger.error("A frame of the engine was lost, all open requests end")
            self._replica.on_lost()
        self._replica.receive(body)


class Replica:
    def __init__(self, number: int, address: str, name: str, frontend: Frontend, serving: Serving, frame_limit: int) -> None:
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
        self._frontend, self._serving = frontend, serving
        self._link = Link(address, name, self, frame_limit)
        self._before = NOTHING  # counts of earlier engines
        self._last_sign = self._stalled = 0.0
        self._supervisor: Supervisor | None = None
        self.view = ViewStream(lambda wanted: self.send(Watch(wanted)))

    def supervise(self, spawn: SpawnConfig) -> None:
        """Starts the engine, which then belongs to this process. If it is already running, the configuration applies to its next start."""
        if self._supervisor is not None:
            self._supervisor.spawn = spawn
            return
        restarts = self._serving.restarts()
        self._supervisor = Supervisor(spawn, restarts, self._on_start, self._on_down, self._on_stays_dead)

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
            self._frontend.on_down(self, "there is a new one")
        self.facts = hello.facts
        self.pins, self.pins_before = None, self.pins or self.pins_before
        self._last_sign, self._stalled = time.monotonic(), 0.0
        self._before = self.stats
        self.state = "ready"
        self.view.begin_again()
        if self._supervisor is not None:
            self._supervisor.ready()
        self._frontend.on_ready(self)

    def receive(self, body: Up) -> None:
        if isinstance(body, Updates):
            self._note(body.stats)
            self._frontend.on_updates(self, body)
        elif isinstance(body, Heartbeat):
            self._note(body.stats)
            self._stalled, self.ranks = body.stalled, body.ranks
            if body.draining and self.state == "ready":
                self.state = "draining"
        elif isinstance(body, Refused):
            self._frontend.on_refused(body)
        elif isinstance(body, View):
            self.view.push(body.frame)
        elif isinstance(body, Cached):
            self._frontend.on_cached(self, body)
        elif isinstance(body, Pinned):
            self.pins = {pin.pin_id: pin for pin in body.pins}
        elif isinstance(body, Lost):
            self.on_lost()

    def _note(self, stats: SchedulerStats) -> None:
        self._last_sign = time.monotonic()
        self.stats = stats if self._before is NOTHING else stats.after(self._before)

    def on_hangup(self) -> None:
        if self._supervisor is None and self.is_there:  # the supervising process knows the reason
            self._on_down("it hung up")

    def on_lost(self) -> None:
        self.view.begin_again()
        self._frontend.on_lost(self)

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
        free = self.stats.num_blocks - 1
        self.stats = replace(self.stats, running=0, waiting=0, free_blocks=free, pinned_blocks=0, held_states=0, checkpoints=0)
        self._frontend.on_down(self, reason)

    def _on_stays_dead(self, error: OctavoError) -> None:
        self.state, self.stays_dead = "dead", True
        self._frontend.on_stays_dead(self, error)
