"""One rank of a model that is split over processes: the process itself, and the messages it receives and sends.

    parent -> rank    RankOrders    the spawn config, one line: rank number, model, settings, the size of the common cache
                      Room          the size of the common cache, if ranks had to report theirs first
                      Forward       a plan, which the rank executes with its part of the weights
                      Sample        the masks of that plan, if it has any: otherwise a rank does not wait for them. Every rank of a
                                    stage samples in the same way, and stores the ids
    rank -> parent    Room          how much cache fits here, if it was not told a size
                      Ready         it has loaded its part; or Failed, with the reason
                      Result        of a step, if other stages computed the beginning; from the first rank of the last stage
                      Beat          a heartbeat every second, with the steps since the previous one

Ranks of a stage communicate inside the steps (`comm/comm.py`), stages pass hidden states on. The process ends with its parent, and
when its pipe is closed. An error in a step ends the rank, and with it the group.
"""

import os
import platform
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import msgspec
import numpy as np
from msgspec import Struct

from octavo import log
from octavo.child import die_with
from octavo.config import EngineConfig, debug_from_environment
from octavo.errors import LoadError, OctavoError, RankLost
from octavo.loading.resolve import ModelSource, load_model_config
from octavo.messages import BEAT_SECONDS, StepPlan, StepResult
from octavo.policy.block_pool import BlockKey, Event
from octavo.policy.cache_spec import CacheGeometry
from octavo.worker.executor import Masks
from octavo.worker.machine import keep_to
from octavo.worker.places import Ends, take_place
from octavo.worker.program import Place

if TYPE_CHECKING:
    from octavo.worker.facts import Facts
    from octavo.worker.model_runner import ModelRunner

LENGTH_BYTES = 4  # prefix of every message


class RankOrders(Struct, frozen=True):
    """The spawn config of one rank."""

    config: EngineConfig
    path: str  # of the model, found by the parent
    kind: Literal["folder", "gguf"]
    name: str
    rank: int
    cpus: list[int]  # that it may run on
    weights: bytes  # identifies the weights of the first rank
    start_seconds: float
    step_seconds: float  # how long it may wait for another rank in a step
    geometry: CacheGeometry | None  # None: it reports what fits, and receives the common size
    log_level: str
    log_format: str
    ends: Ends = Ends()
    address: str = ""  # where ranks connect, if they do not share memory
    host: str = ""  # in that case, the address of its own host
    on_host: int = 0  # ranks that share this host's memory; 0: all
    verify: bool = False  # verify every step against a contiguous cache


class Room(Struct, tag="room", array_like=True, frozen=True):
    """The size of the cache of one rank, or of all."""

    num_blocks: int
    max_model_len: int
    num_states: int = 0  # of a recurrent model

    @staticmethod
    def of(geometry: CacheGeometry) -> "Room":
        return Room(geometry.num_blocks, geometry.max_model_len, geometry.num_states)

    def of_rank(self, own: CacheGeometry) -> CacheGeometry:
        """Returns the cache of a rank with this size."""
        return replace(own, num_blocks=self.num_blocks, max_model_len=self.max_model_len, num_states=self.num_states)


class Forward(Struct, tag="forward", array_like=True, frozen=True):
    plan: StepPlan
    sampled: list[tuple[int, int, int]] = []  # row, position, token: sampled by the last stage since the previous plan
    events: list[tuple[Event, int, BlockKey | None]] = []  # events of blocks since then, if steps are verified


class Sample(Struct, tag="sample", array_like=True, frozen=True):
    masks: bytes | None = None
    words: int = 0  # of a mask


class Ready(Struct, tag="ready", array_like=True, frozen=True):
    """The properties of a rank that has loaded its part."""

    rank: int
    pid: int
    host: str
    cpus: list[int]
    device: str
    kernels: str
    first_layer: int
    num_layers: int
    weight_bytes: int


class Failed(Struct, tag="failed", array_like=True, frozen=True):
    """The reason why a rank ended."""

    kind: str  # the error's class
    message: str


class Result(Struct, tag="result", array_like=True, frozen=True):
    result: StepResult


class Beat(Struct, tag="beat", array_like=True, frozen=True):
    steps: list[tuple[int, float, float]]  # step number, start and end by the clock of this host
    at: float = 0.0  # send time, by the same clock
    began: float | None = None  # start of the current step
    compared: int = 0  # numbers of caches and outputs compared, if steps are verified


def _plain(value: Any) -> bytes | int | float:
    """Returns ids as bytes, and the plain number for a default value, which has a number class of its own."""
    if isinstance(value, array):
        return value.tobytes()
    return int(value) if isinstance(value, int) else float(value)


def _ids(kind: type, data: Any) -> Any:
    ids = array("i")
    ids.frombytes(data)
    return ids


Order = Room | Forward | Sample
Answer = Room | Ready | Failed | Result | Beat
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_orders = msgspec.msgpack.Decoder(Order, dec_hook=_ids)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Order | Answer) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def bodies(pipe: BinaryIO) -> Iterator[bytes]:
    """Yields the messages from a pipe, until it is closed."""
    while len(head := pipe.read(LENGTH_BYTES)) == LENGTH_BYTES:
        yield pipe.read(int.from_bytes(head, "little"))


def order(body: bytes) -> Order:
    found: Order = _orders.decode(body)
    return found


def answer(body: bytes) -> Answer:
    found: Answer = _answers.decode(body)
    return found


def sample(masks: Masks | None) -> Sample:
    return Sample() if masks is None else Sample(masks.tobytes(), masks.shape[1])


def masks_of(message: Sample) -> Masks | None:
    return None if message.masks is None else np.frombuffer(message.masks, np.int32).reshape(-1, message.words).copy()


class Diary:
    """The step log of a rank, for its heartbeats, which another thread sends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[tuple[int, float, float]] = []
        self._step = 0
        self._began: float | None = None  # start of the current step

    def begin(self, step: int) -> None:
        with self._lock:
            self._step, self._began = step, time.monotonic()

    def end(self) -> None:
        with self._lock:
            if self._began is not None:
                self._steps.append((self._step, self._began, time.monotonic()))
            self._began = None

    def beat(self) -> Beat:
        with self._lock:
            steps, self._steps = self._steps, []
            return Beat(steps, time.monotonic(), self._began)


def serve(orders: RankOrders, place: Place, messages: Iterator[bytes], send: Callable[[Answer], None]) -> None:
    """Builds its part of the model, reports that it is ready, and executes plans until there are no more messages."""
    from octavo.worker.build import build_proven
    from octavo.worker.device import compilers_for
    from octavo.worker.facts import settle
    from octavo.worker.shadow import happened

    debug = debug_from_environment()
    source = ModelSource(Path(orders.path), orders.kind, orders.name, orders.config.hf_overrides)
    with compilers_for(orders.config.device) as compilers:
        facts = settle(orders.config, source, load_model_config(source), debug, place)
        if facts.fingerprint() != orders.weights:
            raise LoadError(f"{source.path}: holds other weights than rank 0 found there")
        geometry = _agreed(facts, messages, send) if orders.geometry is None else facts.own_cache(orders.geometry)
        runner, shadow = build_proven(facts, geometry, debug, compilers, orders.verify)
        place.wait_at_most(orders.step_seconds)
        send(about(orders.rank, orders.cpus, facts, runner))
        diary, reports = Diary(), place.stage.last and place.stage.count > 1 and place.comm.rank == 0
        threading.Thread(target=_beat, args=(diary, send), name="beat", daemon=True).start()
        for message in map(order, messages):
            if isinstance(message, Forward):
                diary.begin(message.plan.step)
                for event in message.events:
                    happened(*event, runner, shadow)
                runner.table.learn(message.sampled)
                runner.forward(message.plan)
                if message.plan.mask_rows:  # their masks are still being computed
                    continue
            pending = runner.sample(masks_of(message) if isinstance(message, Sample) else None)
            diary.end()
            if reports:
                send(Result(pending.result()))
        with suppress(OSError):  # the parent may be gone
            send(msgspec.structs.replace(diary.beat(), compared=0 if shadow is None else shadow.compared.values))


def _agreed(facts: "Facts", messages: Iterator[bytes], send: Callable[[Answer], None]) -> CacheGeometry:
    """Reports how much cache fits here. Returns the cache of this rank with the common size."""
    own = facts.plan_cache(alike=False)
    send(Room.of(own))
    room = next(map(order, messages), None)
    if not isinstance(room, Room):
        raise RankLost("rank 0 did not say how large the cache is")
    return room.of_rank(own)


def about(rank: int, cpus: list[int], facts: "Facts", runner: "ModelRunner") -> Ready:
    """Returns the properties of a rank."""
    return Ready(
        rank=rank,
        pid=os.getpid(),
        host=platform.node(),
        cpus=cpus,
        device=str(facts.device),
        kernels=facts.kernels,
        first_layer=facts.layers.start,
        num_layers=len(facts.layers),
        weight_bytes=runner.program.nbytes,
    )


def _beat(diary: Diary, send: Callable[[Answer], None]) -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        send(diary.beat())


class Pipe:
    """The pipe for a rank's answers, with a lock for its threads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, message: Answer) -> None:
        with self._lock:
            view = memoryview(encode(message))
            while view:
                view = view[os.write(self._descriptor, view) :]


def failure(error: BaseException) -> Failed:
    """Returns why a rank ends. Unexpected errors are logged with a traceback."""
    if isinstance(error, (OctavoError, MemoryError, OSError)):
        return Failed(type(error).__name__, str(error) or type(error).__name__)
    log.logger.error("a rank failed", exc_info=error)
    return Failed(type(error).__name__, f"{type(error).__name__}: {error}")


def main(parent: int) -> None:
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles these signals
        signal.signal(number, signal.SIG_IGN)
    answers = Pipe(os.dup(sys.stdout.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with answers
    pipe = sys.stdin.buffer
    orders = msgspec.json.decode(pipe.readline(), type=RankOrders)
    log.setup(orders.log_level, orders.log_format)
    keep_to(orders.cpus)
    code = 0
    try:
        place = take_place(orders.ends, orders.rank, orders.config, orders.start_seconds, orders.address)
        serve(orders, place, bodies(pipe), answers.send)
    except BaseException as error:
        answers.send(failure(error))
        code = 1
    os._exit(code)  # at once, even if other threads run
