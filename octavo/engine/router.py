"""A thread of the engine process that owns the ROUTER socket, so that clients are served during a step.

    this thread    receives frames, refuses requests at once if the queue is full, sends the updates of every step and heartbeats
    main thread    between steps: `take` the commands, step, `give` the updates

A client is an API process. The ids of its requests begin with its name on the socket, so updates find their way back. A client that
is silent for some seconds, or whose process is gone, is dropped: its requests are aborted.
"""

import os
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import zmq

from octavo.child import give_back_freed_memory
from octavo.engine import wire
from octavo.engine.wire import Down, Ping, Refused, Up
from octavo.errors import ConfigError
from octavo.inspector.frames import ViewFrame
from octavo.log import logger
from octavo.messages import AddRequest, Delta, EngineFacts, RankNumbers, SchedulerStats
from octavo.worker.faults import Faults

BEAT_SECONDS = 0.25
GIVE_BACK_SECONDS = 5.0  # the shortest time between two returns of freed memory to the system, while idle
CLIENT_SECONDS = 10.0  # a client that is silent for so long is dropped
IDS_PER_TURN = 65_536  # of prompts, which the loop checks and queues in about 5 ms
FRAMES_AT_ONCE = 256  # received before updates are sent again
BROKEN = 2  # exit code of an engine process that cannot continue


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """The state of the loop, published between steps."""

    at: float
    busy: bool  # another step follows
    steps: int
    taken: int  # requests taken out of the inbox since the start
    free_rows: int
    stats: SchedulerStats  # a snapshot


class _Client:
    __slots__ = ("greeted", "identity", "pid", "received", "seen", "sent")

    def __init__(self, identity: bytes, pid: int) -> None:
        self.identity = identity
        self.pid = pid  # 0: it is on another host, so only its silence shows that it is gone
        self.greeted = False  # it knows that the engine is ready
        self.received = 0  # number of the last frame from it
        self.sent = 0  # number of the last frame to it
        self.seen = time.monotonic()

    @property
    def name(self) -> str:
        return self.identity.decode()

    @property
    def is_gone(self) -> bool:
        if time.monotonic() - self.seen > CLIENT_SECONDS:
            return True
        try:
            os.kill(self.pid or os.getpid(), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


class Router:
    def __init__(
        self, address: str, epoch: int, max_queue: int, frame_limit: int, faults: Faults | None,
        lifeline: int | None = None, far: bool = False,
    ) -> None:  # fmt: skip
        """`lifeline`: a descriptor that closes when the parent ends. `far`: clients are processes of another host."""
        self._epoch = epoch
        self._max_queue = max_queue
        self._faults = faults
        self._lifeline, self._far = lifeline, far
        self._clients: dict[bytes, _Client] = {}
        self._facts: EngineFacts | None = None
        self._status: LoopStatus | None = None
        self._ranks: Callable[[], list[RankNumbers]] = list
        self._draining = False  # it gets no new requests
        self._handed = 0  # requests put into the inbox since the start
        self._roused_at = 0.0  # when a request was put there while the loop was idle
        self._given_back = 0, time.monotonic()  # step after which freed memory was last returned, and when
        self._update_frames = 0
        self._pace = Pace()
        self._inbox: queue.SimpleQueue[wire.Command] = queue.SimpleQueue()
        self._outbox: deque[tuple[list[Delta], list[Refused], SchedulerStats]] = deque()
        self._views: deque[tuple[str, ViewFrame]] = deque()
        self._messages: deque[tuple[str | None, Up]] = deque()  # for one client, or for all
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        for option, value in ((zmq.MAXMSGSIZE, frame_limit), (zmq.SNDHWM, 0), (zmq.LINGER, 0), (zmq.ROUTER_HANDOVER, 1)):
            self._socket.setsockopt(option, value)
        self._address = address
        bind(self._socket, address)

    def start(self) -> None:
        threading.Thread(target=self._run, name="router", daemon=True).start()

    # --- for the main thread ---------------------------------------------------------------------------------------------

    def ready(self, facts: EngineFacts, status: LoopStatus, ranks: Callable[[], list[RankNumbers]] = list) -> None:
        self._status, self._facts, self._ranks = status, facts, ranks
        self._rouse()

    def publish(self, status: LoopStatus) -> None:
        self._status = status

    def take(self, wait: bool, seconds: float | None = None) -> list[wire.Command]:
        """Returns the commands that have arrived, in order, up to about IDS_PER_TURN ids of prompts: the loop must go on with its steps.

        With `wait`, it waits for at least one, for some time or forever.
        """
        commands: list[wire.Command] = []
        ids = 0
        with suppress(queue.Empty):
            while ids < IDS_PER_TURN:
                command = self._inbox.get(wait and not commands, seconds)
                commands.append(command)
                ids += len(command.prompt_token_ids) if isinstance(command, AddRequest) else 0
        return commands

    def give(self, deltas: list[Delta], refused: list[Refused], stats: SchedulerStats) -> None:
        if deltas or refused:
            self._outbox.append((deltas, refused, stats))
            self._rouse()

    def show(self, views: list[tuple[str, ViewFrame]]) -> None:
        if views:
            self._views.extend(views)
            self._rouse()

    def send(self, body: Up, name: str | None = None) -> None:
        """Sends a message to one client, or to all, ahead of the updates that are given later."""
        self._messages.append((name, body))
        self._rouse()

    def _rouse(self) -> None:
        with suppress(BlockingIOError):  # enough signals are already pending
            os.write(self._wake, b"\0")

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            logger.exception("the engine can no longer be reached, so it ends")
            os._exit(BROKEN)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, self._woken, *([] if self._lifeline is None else [self._lifeline])):
            poller.register(each, zmq.POLLIN)
        next_beat = time.monotonic()
        while True:
            wait = max(0.0, next_beat - time.monotonic())
            events = dict(poller.poll(int(wait * 1000) + 1))
            if self._lifeline is not None and self._lifeline in events and not os.read(self._lifeline, 4096):
                os._exit(0)  # no client is left
            if self._woken in events:
                os.read(self._woken, 4096)
            if self._socket in events:
                self._receive()
            self._greet()
            self._send_updates()
            if time.monotonic() >= next_beat:
                self._beat()
                next_beat = time.monotonic() + BEAT_SECONDS

    def _receive(self) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = wire.decode_down(parts[0]) if len(parts) == 1 else None
            if frame is not None:
                self._accept(identity, frame)
            elif identity in self._clients:
                self._lose(self._clients[identity])

    def _accept(self, identity: bytes, frame: wire.DownFrame) -> None:
        client = self._clients.get(identity)
        if isinstance(frame.body, Ping) and (client is None or frame.epoch != self._epoch):
            self._meet(identity, client, frame, frame.body)
            return
        if client is None or frame.epoch != self._epoch:
            return  # meant for the previous engine
        client.seen = time.monotonic()
        expected, client.received = client.received + 1, frame.number
        if frame.number != expected:
            self._lose(client)
        else:
            self._obey(client, frame.body)

    def _meet(self, identity: bytes, client: _Client | None, frame: wire.DownFrame, ping: Ping) -> None:
        """Greets a client that is new, or that does not know yet that this is a new engine."""
        if client is None:
            if not identity.isalnum():
                return  # not a frame of ours
            client = self._clients[identity] = _Client(identity, 0 if self._far else ping.pid)
            if frame.epoch == self._epoch:  # it was dropped and is back
                client.greeted = True
                self._start_again(client)
        elif client.greeted:  # it has dropped this engine, or has not received the greeting yet
            client.greeted = False
            self._inbox.put(wire.Gone(client.name))
        client.seen, client.received = time.monotonic(), frame.number

    def _greet(self) -> None:
        """Informs clients that the engine is ready, if they do not know it yet."""
        if self._facts is None:
            return
        for client in self._clients.values():
            if not client.greeted:
                client.greeted = True
                self._send(client, wire.Hello(self._facts))
                self._inbox.put(wire.Met(client.name))

    def _obey(self, client: _Client, body: Down) -> None:
        if isinstance(body, Ping):
            return
        if isinstance(body, wire.ResetPrefixCache | wire.Unpin):
            self._inbox.put(body)
            return
        if isinstance(body, wire.Drain):
            self._draining = True
            return
        if isinstance(body, wire.Watch):
            self._inbox.put(wire.Watching(client.name, body.wanted))
            return
        request_id = body.request.request_id if isinstance(body, wire.Add) else body.request_id
        if not request_id.startswith(f"{client.name}-"):
            logger.warning("Dropped a message about request %r, which is not of client %s", request_id[:80], client.name)
        elif isinstance(body, wire.Abort):
            self._inbox.put(body)
            self._count_end(body.index)
        elif self._is_full() and not body.moved:
            text = f"the queue is full: max_queue is {self._max_queue}, try again later"
            self._send(client, Refused(request_id, "overload", text, retry_after=self._pace.retry_after(self._waiting, time.monotonic())))
        else:
            if self._status is not None and not self._status.busy and self._handed == self._status.taken:
                self._roused_at = time.monotonic()
                self._pace.begin(self._roused_at)
            self._handed += 1
            self._inbox.put(body.request)

    @property
    def _waiting(self) -> int:
        return 0 if self._status is None else self._status.stats.waiting + self._handed - self._status.taken

    def _is_full(self) -> bool:
        return self._status is None or self._waiting - self._status.free_rows >= self._max_queue

    def _count_end(self, index: int | None) -> None:
        """Counts the end of a request: the end of its first sample, or of all."""
        if not index:
            self._pace.end(time.monotonic())

    def _lose(self, client: _Client) -> None:
        """Drops all requests of a client that lost a frame: it is unknown which one, so none is reliable."""
        logger.error("A frame of client %s was lost, its requests end", client.name)
        self._inbox.put(wire.Gone(client.name))
        self._start_again(client)

    def _start_again(self, client: _Client) -> None:
        """Tells a client that its requests are gone. It has forgotten what this engine holds, so the engine reports that again."""
        self._send(client, wire.Lost())
        self._inbox.put(wire.Met(client.name))

    def _send_updates(self) -> None:
        while self._messages:
            name, body = self._messages.popleft()
            for client in [each for each in self._clients.values() if each.greeted and name in (None, each.name)]:
                self._send(client, body)
        while self._outbox:
            deltas, refused, stats = self._outbox.popleft()
            for each in refused:
                self._send_to(each.request_id, each)
            by_client: defaultdict[str, list[Delta]] = defaultdict(list)
            for delta in deltas:
                by_client[delta.request_id.partition("-")[0]].append(delta)
                if delta.finish_reason is not None:
                    self._count_end(delta.index)
            for name, own in by_client.items():
                for part in wire.sliced(own):
                    self._send_to(name, wire.Updates(part, stats))
        while self._views:
            name, frame = self._views.popleft()
            self._send_to(name, wire.View(frame))

    def _send_to(self, request_id: str, body: Up) -> None:
        if (client := self._clients.get(request_id.partition("-")[0].encode())) is not None:
            self._send(client, body)

    def _send(self, client: _Client, body: Up) -> None:
        client.sent += 1
        frame = wire.encode(wire.UpFrame(self._epoch, client.sent, body))
        if isinstance(body, wire.Updates):
            self._update_frames += 1
            if self._faults is not None:
                frame = self._faults.on_the_way(self._update_frames, frame)
        if frame:
            self._socket.send_multipart([client.identity, frame], zmq.NOBLOCK)

    def _stay_reachable(self) -> None:
        """Binds again if the socket's file was removed. The first API process restores the folder. Existing connections continue."""
        if not os.path.exists(self._address.removeprefix("ipc://")):
            with suppress(ConfigError):  # it is tried again later
                bind(self._socket, self._address)

    def _beat(self) -> None:
        self._stay_reachable()
        for client in [client for client in self._clients.values() if client.is_gone]:
            logger.warning("API process %s is gone, its requests are aborted", client.pid or client.name)
            del self._clients[client.identity]
            self._inbox.put(wire.Gone(client.name))
        status = self._status
        if status is None:
            return
        if status.steps != self._given_back[0] and not status.busy and time.monotonic() - self._given_back[1] > GIVE_BACK_SECONDS:
            self._given_back = status.steps, time.monotonic()
            give_back_freed_memory()
        inbox = self._handed - status.taken
        stalled = stalled_for(status, inbox, self._roused_at, time.monotonic())
        stats = replace(status.stats, waiting=status.stats.waiting + inbox)
        beat = wire.Heartbeat(status.steps, stalled, stats, self._ranks(), self._draining)
        for client in self._clients.values():
            if client.greeted:
                self._send(client, beat)


def bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"the engine's socket {address} cannot be made: {error.strerror}; set TMPDIR to another folder") from error


def stalled_for(status: LoopStatus, inbox: int, roused_at: float, now: float) -> float:
    """Returns how long the loop has had work without turning. Without work it may sleep."""
    return now - max(status.at, roused_at) if status.busy or inbox else 0.0


# -- the `Retry-After` of a full queue: the number of waiting requests divided by the rate at which requests ended recently

RECENT = 64  # ends from which the rate is computed
SHORTEST, LONGEST = 1.0, 60.0  # bounds of `Retry-After` in seconds


class Pace:
    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=RECENT + 1)  # the recent ends, after the one from which time is counted

    def begin(self, now: float) -> None:
        """Starts to count again, because the engine was idle before."""
        self._times.clear()
        self._times.append(now)

    def end(self, now: float) -> None:
        self._times.append(now)

    def retry_after(self, waiting: int, now: float) -> float:
        """Returns the seconds until as many requests have ended as wait now, or the shortest wait if none has ended yet."""
        if len(self._times) < 2:
            return SHORTEST
        each = (now - self._times[0]) / (len(self._times) - 1)  # up to now, so that a stall counts as slow
        return min(max(waiting * each, SHORTEST), LONGEST)
