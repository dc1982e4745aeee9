"""An engine on a node of a Ray cluster: the actor that its bridge calls (`engine/ray_engine.py`).

    bridge    push: frames of clients      -->  actor   a DEALER for each client  -->  engine process (`engine/process.py`)
              <--  pull: frames of the engine           <--

Calls and their answers carry bytes: no object of ours goes through Ray. The engine process is a child of the actor and ends with it.
It does not know that it is on Ray.
"""

import os
import queue
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from octavo.child import command, how_ended
from octavo.config import environment_with
from octavo.engine.process import Reason, SpawnConfig
from octavo.engine.supervisor import SocketFolder
from octavo.version import __version__
from octavo.worker.machine import allowed_cpus
from octavo.worker.ray_actor import Node
from octavo.worker.ray_cluster import own_address

LOOK_MS = 1000  # between two checks of the socket's folder
SILENT_SECONDS = 60.0  # a client that is silent for so long is forgotten
MOST_FRAMES = 1024  # in one answer

Frame = tuple[bytes, bytes]  # the name of a client, and a frame from it or for it


class Begin(Struct, frozen=True):
    """The configuration of an engine, and environment variables for it."""

    spawn: SpawnConfig
    environment: dict[str, str]


class Carried(Struct, array_like=True, frozen=True):
    """Frames in the order in which they were sent, and the reason if there will be no more."""

    frames: list[Frame]
    ended: Reason | None = None


class EngineActor:
    def __init__(self) -> None:
        self._down: deque[Frame] = deque()
        self._up: queue.SimpleQueue[Frame | Reason] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def look(self) -> bytes:
        """Returns a `Node`."""
        return msgspec.json.encode(Node(os.getpid(), allowed_cpus(), __version__))

    def clock(self) -> bytes:
        """Returns the time of this host by the engines' clock."""
        return msgspec.json.encode(time.monotonic())

    def begin(self, data: bytes) -> None:
        begin = msgspec.json.decode(data, type=Begin)
        folder = SocketFolder()
        threading.Thread(target=self._live, args=(begin, folder.address), name="engine", daemon=True).start()
        threading.Thread(target=self._carry, args=(folder,), name="carrier", daemon=True).start()

    def push(self, data: bytes) -> None:
        self._down.extend(msgspec.msgpack.decode(data, type=Carried).frames)
        with suppress(BlockingIOError):  # enough signals are already pending
            os.write(self._wake, b"\0")

    def pull(self) -> bytes:
        """Waits for frames of the engine. Returns all of them, and the reason if the engine has ended."""
        frames: list[Frame] = []
        item = self._up.get()
        while not isinstance(item, Reason):
            frames.append(item)
            if len(frames) == MOST_FRAMES or self._up.empty():
                return msgspec.msgpack.encode(Carried(frames))
            item = self._up.get()
        return msgspec.msgpack.encode(Carried(frames, item))

    def _live(self, begin: Begin, address: str) -> None:
        """Starts the engine process and waits for its end. The system kills the process when the thread that started it ends."""
        try:
            spawn = msgspec.json.encode(msgspec.structs.replace(begin.spawn, address=address)) + b"\n"
            variables = environment_with(begin.environment | own_address())  # an engine of several ranks asks Ray for them
            words = command("octavo.engine.process", "main", os.getpid())
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.write(spawn)
                process.stdin.flush()
            said = process.stdout.read()
            self._up.put(_reason(said, process.wait()))
        except BaseException as error:
            self._up.put(Reason("EngineError", f"no process could be started: {error}"))

    def _carry(self, folder: SocketFolder) -> None:
        try:
            carrier = Carrier(folder.address)
            while True:
                carrier.wait(self._woken, LOOK_MS)
                while self._down:
                    carrier.send(*self._down.popleft())
                for frame in carrier.receive():
                    self._up.put(frame)
                with suppress(OSError):  # the code that needs the folder reports its absence
                    folder.make_again()
        except BaseException as error:
            self._up.put(Reason("EngineError", f"its frames can no longer be carried: {type(error).__name__}: {error}"))


class Carrier:
    """The sockets of all clients, as the engine process sees them. One thread owns them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._sockets: dict[bytes, zmq.Socket[bytes]] = {}
        self._seen: dict[bytes, float] = {}
        self._poller = zmq.Poller()
        self._ready: list[Any] = []

    def wait(self, woken: int, milliseconds: int) -> None:
        """Waits until there is something to send or to receive."""
        if woken not in self._poller:
            self._poller.register(woken, zmq.POLLIN)
        self._ready = [ready for ready, _ in self._poller.poll(milliseconds)]
        if woken in self._ready:
            os.read(woken, 4096)

    def send(self, name: bytes, frame: bytes) -> None:
        self._seen[name] = time.monotonic()
        if name not in self._sockets:
            self._forget_silent()
            self._sockets[name] = self._connected(name)
        self._sockets[name].send(frame, zmq.NOBLOCK)

    def receive(self) -> list[Frame]:
        """Returns everything that the engine has sent. Frames for one client stay in order."""
        found: list[Frame] = []
        for name, socket in self._sockets.items():
            with suppress(zmq.Again):
                while True:
                    found.append((name, socket.recv(zmq.NOBLOCK)))
        return found

    def _connected(self, name: bytes) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name)
        # frames wait for an engine that is not there yet; nothing is dropped
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, 50)):
            socket.setsockopt(option, value)
        socket.connect(self._address)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _forget_silent(self) -> None:
        """Closes the sockets of clients that are gone. The engine has dropped them long before."""
        now = time.monotonic()
        for name in [name for name in self._sockets if now - self._seen[name] > SILENT_SECONDS]:
            self._poller.unregister(self._sockets[name])
            self._sockets.pop(name).close()
            del self._seen[name]


def _reason(said: bytes, code: int) -> Reason:
    """Returns why the engine ended: its own reason, or how its process ended."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(said, type=Reason)
    return Reason("EngineError", f"it {how_ended(code)}")
