"""The bridge to an engine on a node of a Ray cluster: a process on the server's host, in place of the engine process.

    API processes  -- unix socket -->  bridge  -- calls of an actor with bytes -->  actor and engine process (`engine/ray_host.py`)

The server sees it as an engine process: it reads its configuration from stdin, writes why it ended to stdout, and ends with its parent.
It finds a node for the engine, and forwards frames unchanged. If the actor or its node dies, the bridge ends, and the server starts
another one. If the bridge ends, Ray ends the actor.
"""

import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.config import passed_on
from octavo.engine.process import Reason, SpawnConfig, run_child
from octavo.engine.ray_host import Begin, Carried, EngineActor, Frame
from octavo.engine.router import FRAMES_AT_ONCE, bind
from octavo.errors import ConfigError
from octavo.log import Stopwatch, logger
from octavo.worker.ray_cluster import LOOK_SECONDS, Spot, reason_of

CLOCK_READS = 5  # the quickest answer gives the most exact difference between the clocks
CALLS_AHEAD = 2  # calls that wait for updates: one waits while the answer of the other travels
LOOK_MS = 1000  # between two checks of the socket's file


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
