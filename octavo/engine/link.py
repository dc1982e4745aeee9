"""An API process's end of the socket: `Link` sends and receives frames and detects losses; `ViewStream` requests frames of the view.

The socket's descriptor is edge-triggered, and any call may consume its signal. So every look reads everything that has arrived, and
every send is followed by a look.

Updates wait while requests keep arriving, and after a look for as long as that look and the readers of its updates took, but never
more than 50 ms. So requests that arrive together compute together, and streams take at most half of the event loop's time. A lone
stream waits less than a millisecond. With hundreds of streams, the updates of several steps are read and written at once, which
takes far less time than one after the other.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Protocol

import zmq

from octavo.engine import wire
from octavo.engine.wire import (
    Add,
    Beat,
    Cached,
    Down,
    DownFrame,
    Hello,
    Lost,
    News,
    Ping,
    Pinned,
    Refused,
    UpFrame,
    View,
    ViewFrame,
    Wanted,
    Watch,
)
from octavo.errors import RequestError, UnavailableError
from octavo.log import logger

LAST_WORDS_MS = 200  # time that the last messages may take to be sent
SLICE_SECONDS, MOST_SLICE_SECONDS = 0.01, 0.05  # other tasks get their turn after this time
BURST_SECONDS = 0.002  # requests that arrive in a row are at most this far apart
MOST_WAIT_SECONDS = 0.05


class Listener(Protocol):
    """The receiver of incoming messages."""

    def on_hello(self, hello: Hello) -> None: ...

    def on_news(self, news: News) -> None: ...

    def on_refused(self, refused: Refused) -> None: ...

    def on_beat(self, beat: Beat) -> None: ...

    def on_view(self, view: View) -> None: ...

    def on_cached(self, cached: Cached) -> None: ...

    def on_pinned(self, pinned: Pinned) -> None: ...

    def on_hangup(self) -> None: ...

    def on_lost(self) -> None: ...


class Link:
    def __init__(self, address: str, name: str, listener: Listener, frame_limit: int) -> None:
        """`name`: this process's name on the socket, and the prefix of every request id."""
        self.epoch = 0  # of the connected engine; 0: none
        self.least_epoch = 1  # an engine with a lower epoch is dead
        self._listener = listener
        self._frame_limit = frame_limit
        self._sent = self._heard = 0
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
                self._listener.on_hangup()
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
                self._hear(frame)
            if time.monotonic() > end:
                self._look()
                break
        self._looked = time.monotonic()
        self._loop.call_soon(self._rest, now)

    def _hear(self, frame: UpFrame) -> None:
        body = frame.body
        if isinstance(body, Hello) and frame.epoch > self.epoch and frame.epoch >= self.least_epoch:
            self.epoch, self._heard = frame.epoch, frame.number
            self._listener.on_hello(body)
            return
        if frame.epoch != self.epoch:
            return  # sent by an engine that is dead
        expected, self._heard = self._heard + 1, frame.number
        if frame.number != expected:
            logger.error("A frame of the engine was lost, all open requests end")
            self._listener.on_lost()
        if isinstance(body, News):
            self._listener.on_news(body)
        elif isinstance(body, Beat):
            self._listener.on_beat(body)
        elif isinstance(body, Refused):
            self._listener.on_refused(body)
        elif isinstance(body, View):
            self._listener.on_view(body)
        elif isinstance(body, Cached):
            self._listener.on_cached(body)
        elif isinstance(body, Pinned):
            self._listener.on_pinned(body)
        elif isinstance(body, Lost):
            self._listener.on_lost()


# -- the view, for one reader
#
# Every frame is requested, at most ten times a second. After a restart of the engine or a lost message, the next frame is full.

PERIOD_SECONDS = 0.1
MOST_NAMES = 1024
RETRY_SECONDS = 30.0  # an engine that was restarted can be watched


class ViewStream:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._wanted: Wanted = "full"
        self._answer: asyncio.Future[ViewFrame | None] | None = None
        self._names: dict[str, str] | None = None  # of requests that ended while a client watches

    async def frames(self) -> AsyncGenerator[ViewFrame, None]:
        """Yields frames forever. Leaving the iteration ends the watch. Raises if the engine can send no more."""
        self._wanted, self._names = "full", {}
        try:
            while True:
                frame = await self._next()
                if frame is not None:
                    yield frame
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            self._names = None
            self._say("none")

    def remember(self, request_id: str, name: str) -> None:
        """Keeps the name of a request that has ended here, because the frame with its end may still arrive."""
        if self._names is not None and name:
            self._names[request_id] = name
            if len(self._names) > MOST_NAMES:
                del self._names[next(iter(self._names))]

    def name(self, request_id: str) -> str | None:
        return (self._names or {}).get(request_id)

    def push(self, frame: ViewFrame) -> None:
        if self._answer is None or self._answer.done():
            return
        if frame.error:
            self._answer.set_exception(UnavailableError(frame.error, RETRY_SECONDS))
        elif frame.full == (self._wanted == "full"):
            self._wanted = "delta"
            self._answer.set_result(frame)

    def begin_again(self) -> None:
        """Requests a full frame next, because the requested one will not arrive."""
        self._wanted = "full"
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    async def _next(self) -> ViewFrame | None:
        if not self._say(self._wanted):
            return None  # another engine may start soon
        self._answer = self._loop.create_future()
        try:
            return await self._answer
        finally:
            self._answer = None

    def _say(self, wanted: Wanted) -> bool:
        try:
            self._link.send(Watch(wanted))
        except UnavailableError:
            logger.debug("the view cannot be asked for: the engine cannot be reached")
            return False
        return True
