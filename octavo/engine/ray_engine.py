"""An engine on a node of a Ray cluster. On the server's host, a bridge is in place of the engine process.

    API processes  -- unix socket -->  bridge  -- calls of an actor with bytes -->  actor  -- unix socket -->  engine process

The server sees the bridge as an engine process: it reads its configuration from stdin, writes why it ended to stdout, and ends with its
parent. It finds a node for the engine, and forwards frames unchanged. If the actor or its node dies, the bridge ends, and the server
starts another one. If the bridge ends, Ray ends the actor.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from octavo.child import command, how_ended
from octavo.config import environment_with, passed_on
from octavo.engine.process import Reason, SpawnConfig, run_child
from octavo.engine.router import FRAMES_AT_ONCE, bind
from octavo.engine.supervisor import SocketFolder
from octavo.errors import ConfigError
from octavo.log import Stopwatch, logger
from octavo.version import __version__
from octavo.worker.machine import allowed_cpus
from octavo.worker.ray_actor import Node
from octavo.worker.ray_cluster import LOOK_SECONDS, Spot, own_address, reason_of

CLOCK_READS = 5  # the quickest answer gives the most exact difference between the clocks
CALLS_AHEAD = 2  # calls that wait for updates: one waits while the answer of the other travels
LOOK_MS = 1000  # between two checks of a socket's file or folder
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


# -- on the server's host


def main(parent: int) -> None:
    run_child(parent, _serve)


def _serve(spawn: SpawnConfig) -> None:
    """Runs forever. Raises if the engine cannot start or continue."""
    watch, gpus = Stopwatch(), spawn.config.device == "cuda"
    if gpus and spawn.config.num_ranks > 1:
        raise ConfigError(
            "engines on Ray have one GPU each: leave out tensor_parallel_size and pipeline_parallel_size, or data_parallel_size"
        )
    folder = Path(spawn.address.removeprefix("ipc://")).parent
    spot = Spot(EngineActor, folder, spawn.engines, spawn.number, gpus, _most(spawn), spawn.silent)
    actor = spot.actors[0]
    own = msgspec.structs.replace(
        spawn, address="", on_host=spot.on_host, place=spot.place, far=True, clock_ahead=_clock_ahead(spot.ray, actor),
        memory_share=1 if spawn.memory_share == 1 else spot.on_host,
    )  # fmt: skip
    actor.begin.options(num_returns=0).remote(msgspec.json.encode(Begin(own, passed_on())))
    logger.info("Engine %d begins on %s, on Ray, after %.2f seconds", spawn.number, spot.host, watch.total())
    Bridge(spawn.address, spot.ray, actor, f"engine {spawn.number} on {spot.host}").run(sys.stdin.fileno())


def _most(spawn: SpawnConfig) -> int:
    """Returns the CPUs that all engines need, for the first engine that starts. An engine of several ranks asks Ray for each rank."""
    ranks = spawn.config.num_ranks
    return spawn.engines * (1 + ranks if ranks > 1 else 1) if spawn.epoch == 1 and spawn.number == 0 else 0


def _clock_ahead(ray: Any, actor: Any) -> float:
    """Returns the seconds by which the clock of this host is ahead of the actor's."""
    reads = []
    for _ in range(CLOCK_READS):
        asked = time.monotonic()
        there = msgspec.json.decode(ray.get(actor.clock.remote(), timeout=LOOK_SECONDS), type=float)
        answered = time.monotonic()
        reads.append((answered - asked, (asked + answered) / 2 - there))
    return min(reads)[1]


class Bridge:
    """The main thread owns the socket; another thread waits for frames of the engine."""

    def __init__(self, address: str, ray: Any, actor: Any, name: str) -> None:
        """`name`: the engine's name, for messages about why it ended."""
        self._address, self._name = address, name
        self._ray = ray
        self._push = actor.push.options(num_returns=0)
        self._pull = actor.pull.options(concurrency_group="answers")
        self._came: deque[Carried] = deque()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.ROUTER_HANDOVER, 1)):
            self._socket.setsockopt(option, value)
        bind(self._socket, address)

    def run(self, lifeline: int) -> None:
        """Forwards frames until the engine ends, and raises the reason. `lifeline`: a descriptor that closes when the parent ends."""
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        poller = zmq.Poller()
        for each in (self._socket, self._woken, lifeline):
            poller.register(each, zmq.POLLIN)
        while True:
            events = dict(poller.poll(LOOK_MS))
            if lifeline in events and not os.read(lifeline, 4096):
                os._exit(0)  # no client is left
            if self._woken in events:
                os.read(self._woken, 4096)
            if frames := self._received():
                self._push.remote(msgspec.msgpack.encode(Carried(frames)))
            while self._came:
                self._give(self._came.popleft())
            self._stay_reachable()

    def _received(self) -> list[Frame]:
        frames: list[Frame] = []
        with suppress(zmq.Again):
            while len(frames) < FRAMES_AT_ONCE:
                name, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
                frames += [(name, part) for part in parts[:1]]
        return frames

    def _give(self, carried: Carried) -> None:
        for name, frame in carried.frames:
            self._socket.send_multipart([name, frame], zmq.NOBLOCK)
        if carried.ended is not None:
            raise carried.ended.error(self._name)

    def _stay_reachable(self) -> None:
        """Binds again if the socket's file was removed."""
        if not os.path.exists(self._address.removeprefix("ipc://")):
            with suppress(ConfigError):  # it is tried again later
                bind(self._socket, self._address)

    # --- the thread that listens -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        calls = deque(self._pull.remote() for _ in range(CALLS_AHEAD))
        carried = Carried([])
        while carried.ended is None:
            try:
                carried = msgspec.msgpack.decode(self._ray.get(calls.popleft()), type=Carried)
                calls.append(self._pull.remote())
            except Exception as error:  # the actor died, the node is gone, or the cluster was left
                carried = Carried([], Reason("EngineError", f"it is gone: {reason_of(error)}"))
            self._came.append(carried)
            with suppress(BlockingIOError):  # enough signals are already pending
                os.write(self._wake, b"\0")


# -- on the node
#
#     bridge    push: frames of clients      -->  actor   a DEALER for each client  -->  engine process (`engine/process.py`)
#               <--  pull: frames of the engine           <--
#
# Calls and their answers carry bytes: no object of ours goes through Ray. The engine process is a child of the actor and ends with it.
# It does not know that it is on Ray.


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
