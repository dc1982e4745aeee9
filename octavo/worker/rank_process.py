"""One rank of a model that is split over processes: the process itself, and what it is told.

    orders    one line: which rank it is, the model, the settings, the cache that all ranks have
    ready     it answers with an empty line; with a `Reason` if it cannot start
    Forward   a plan, which it carries out with its part of the weights
    Sample    the masks of that plan; it samples as every rank does, and keeps the ids

Ranks meet inside the steps (`layers/comm.py`); nothing comes back through the pipe. The process ends with its parent, and when its
pipe is closed. What goes wrong in a step ends the rank, and with it the group.
"""

import os
import signal
import sys
from array import array
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
from msgspec import Struct

from octavo import log
from octavo.child import die_with
from octavo.config import EngineConfig, debug_from_environment
from octavo.errors import LoadError, OctavoError
from octavo.loading.resolve import ModelSource, load_model_config
from octavo.messages import StepPlan
from octavo.policy.cache_spec import CacheGeometry
from octavo.worker.executor import Masks
from octavo.worker.machine import keep_to

LENGTH_BYTES = 4  # before every message


class RankOrders(Struct, frozen=True):
    """The orders of one rank."""

    config: EngineConfig
    path: str  # of the model, found by the parent
    kind: Literal["folder", "gguf"]
    name: str
    rank: int
    cpus: list[int]  # that it may use
    weights: bytes  # what identifies the weights that the first rank has
    memory: int  # the descriptor through which the ranks meet
    context_memory: int | None  # the same for the ranks that share a context with this one
    start_seconds: float
    step_seconds: float  # that it may wait for another rank in a step
    geometry: CacheGeometry
    log_level: str
    log_format: str


class Forward(Struct, tag="forward", array_like=True, frozen=True):
    plan: StepPlan


class Sample(Struct, tag="sample", array_like=True, frozen=True):
    masks: bytes | None = None
    words: int = 0  # of a mask


def _plain(value: Any) -> bytes | int | float:
    """Returns ids as bytes, and a plain number for a default that nobody has set, which is a number of its own class."""
    if isinstance(value, array):
        return value.tobytes()
    return int(value) if isinstance(value, int) else float(value)


def _ids(kind: type, data: Any) -> Any:
    ids = array("i")
    ids.frombytes(data)
    return ids


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(Forward | Sample, dec_hook=_ids)


def encode(message: Forward | Sample) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read(pipe: BinaryIO) -> Forward | Sample | None:
    """Returns the next message, or None when the pipe is closed."""
    head = pipe.read(LENGTH_BYTES)
    return _decoder.decode(pipe.read(int.from_bytes(head, "little"))) if len(head) == LENGTH_BYTES else None


def sample(masks: Masks | None) -> Sample:
    return Sample() if masks is None else Sample(masks.tobytes(), masks.shape[1])


def masks_of(message: Sample) -> Masks | None:
    return None if message.masks is None else np.frombuffer(message.masks, np.int32).reshape(-1, message.words).copy()


def serve(orders: RankOrders, pipe: BinaryIO, answers: int) -> None:
    """Builds its part of the model, says that it is ready, and carries out plans until the pipe is closed."""
    from octavo.layers.shared_comm import SharedMemoryComm
    from octavo.worker.build import build_runner
    from octavo.worker.context_groups import PATIENCE, join_context
    from octavo.worker.device import compilers_for
    from octavo.worker.facts import settle

    debug, source = debug_from_environment(), ModelSource(Path(orders.path), orders.kind, orders.name)
    size = orders.config.tensor_parallel_size
    comm = SharedMemoryComm.join(orders.memory, orders.rank, size, orders.start_seconds)
    context = join_context(orders.context_memory, orders.rank, orders.config.decode_context_parallel_size, orders.start_seconds)
    with compilers_for(orders.config.device) as compilers:
        facts = settle(orders.config, source, load_model_config(source), debug, comm, context)
        if facts.fingerprint() != orders.weights:
            raise LoadError(f"{source.path}: holds other weights than rank 0 found there")
        runner = build_runner(facts, orders.geometry, debug, compilers)
        comm.wait_at_most(orders.step_seconds)
        if isinstance(context, SharedMemoryComm):
            context.wait_at_most(PATIENCE * orders.step_seconds)
        os.write(answers, b"\n")
        while (message := read(pipe)) is not None:
            if isinstance(message, Forward):
                runner.forward(message.plan)
            else:
                runner.sample(masks_of(message))


def main(parent: int) -> None:
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides what they mean
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    pipe = sys.stdin.buffer
    orders = msgspec.json.decode(pipe.readline(), type=RankOrders)
    log.setup(orders.log_level, orders.log_format)
    keep_to(orders.cpus)
    code = 0
    try:
        serve(orders, pipe, answers)
    except (OctavoError, MemoryError, OSError) as error:
        os.write(answers, msgspec.json.encode(Reason(type(error).__name__, str(error) or type(error).__name__)) + b"\n")
        code = 1
    except BaseException as error:
        log.logger.error("rank %d failed", orders.rank, exc_info=error)
        os.write(answers, msgspec.json.encode(Reason(type(error).__name__, f"{type(error).__name__}: {error}")) + b"\n")
        code = 1
    os._exit(code)  # at once, whatever other threads do


class Reason(Struct, frozen=True):
    """The reason why a rank ended."""

    kind: str  # the error's class
    message: str
