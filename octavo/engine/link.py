"""An API process's end of the socket: frames out, frames in, and whether any were lost.

The socket's descriptor tells of events only when they begin, and any call may swallow that sign: so whatever is there is taken
whenever it is looked at, and it is looked at after every send.
"""

import asyncio
import os
import secrets
import time
from contextlib import suppress
from typing import Protocol

import zmq

from octavo.engine import wire
from octavo.engine.wire import Beat, Down, DownFrame, Hello, Lost, News, Ping, Refused, UpFrame, View
from octavo.errors import RequestError, UnavailableError
from octavo.log import logger

LAST_WORDS_MS = 200  # so long may what was said last take to leave
SLICE_SECONDS = 0.01  # other tasks get their turn after so long


class Listener(Protocol):
    """Who is told what came in."""

    def on_hello(self, hello: Hello) -> None: ...

    def on_news(self, news: News) -> None: ...

    def on_refused(self, refused: Refused) -> None: ...

    def on_beat(self, beat: Beat) -> None: ...

    def on_view(self, view: View) -> None: ...

    def on_hangup(self) -> None: ...

    def on_lost(self) -> None: ...


class Link:
    def __init__(self, address: str, listener: Listener, frame_limit: int) -> None:
        self.name = secrets.token_hex(4)  # on the socket, and at the head of every request id
        self.epoch = 0  # of the engine it speaks to; 0: none
        self.least_epoch = 1  # an engine before this one is dead
        self._listener = listener
        self._frame_limit = frame_limit
        self._sent = self._heard = 0
        self._looking = False
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.name.encode())
        # nothing waits for an engine that is not there; nothing is dropped for one that is
        for option, value in ((zmq.IMMEDIATE, 1), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, 50)):
            self._socket.setsockopt(option, value)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._loop.add_reader(self._socket.fileno(), self._look)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.disable_monitor()
            self.forget()
            self._socket.close(linger=LAST_WORDS_MS)

    def forget(self) -> None:
        """The engine is dead: what still comes of it is dropped."""
        self.epoch = 0

    def ping(self) -> None:
        """Called a few times a second: says that we are there, and looks whether the engine still is."""
        with suppress(zmq.Again):
            while self._monitor.recv_multipart(zmq.NOBLOCK):
                self._listener.on_hangup()
        self._send(Ping(os.getpid()))

    def send(self, body: Down) -> None:
        if not self.epoch or not self._send(body):
            raise UnavailableError("the engine cannot be reached", retry_after=1)

    def _send(self, body: Down) -> bool:
        frame = wire.encode(DownFrame(self.epoch, self._sent + 1, body))
        if len(frame) > self._frame_limit:  # the engine would hang up
            raise RequestError(f"the request takes {len(frame)} bytes, the most is {self._frame_limit}: shorten its stop strings and words")
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent += 1
        self._look()
        return True

    def _look(self) -> None:
        """Soon, and once however often it is asked for: what is there may take a while to read."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        self._looking = False
        start = time.monotonic()
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = wire.decode_up(data)
            if frame is not None:
                self._hear(frame)
            if time.monotonic() - start > SLICE_SECONDS:
                self._look()
                return

    def _hear(self, frame: UpFrame) -> None:
        body = frame.body
        if isinstance(body, Hello) and frame.epoch > self.epoch and frame.epoch >= self.least_epoch:
            self.epoch, self._heard = frame.epoch, frame.number
            self._listener.on_hello(body)
            return
        if frame.epoch != self.epoch:
            return  # of an engine that is dead
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
        elif isinstance(body, Lost):
            self._listener.on_lost()
