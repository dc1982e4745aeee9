"""What crosses between an API process and the engine process: one msgpack frame a message, decoded into exactly these types.

    API process  --  Ping, Add, Abort, ResetPrefixCache, Watch  -->  engine process        DEALER to ROUTER over a unix socket
                <--  Hello, Beat, News, Refused, Lost, View     --

A frame carries the epoch, which start of the engine it belongs to, and a number, which counts the frames of one client in one
direction: who sees a gap knows that something was lost. What is no frame is dropped and logged; it can do no more than that.
"""

from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from octavo.config import EngineConfig
from octavo.engine.view_frame import ViewFrame, Wanted
from octavo.log import logger
from octavo.messages import AddRequest, Delta, EngineFacts, SchedulerStats
from octavo.model_config import ModelConfig

TEXTS = 1 << 20  # bytes


class Ping(Struct, tag="ping", array_like=True, frozen=True):
    """A client is there, and speaks to this epoch; 0: it knows of none."""

    pid: int


class Add(Struct, tag="add", array_like=True, frozen=True):
    request: AddRequest


class Abort(Struct, tag="abort", array_like=True, frozen=True):
    request_id: str
    index: int | None = None  # of the sample; None: all


class ResetPrefixCache(Struct, tag="reset", array_like=True, frozen=True):
    pass


class Watch(Struct, tag="watch", array_like=True, frozen=True):
    """One frame of the view is wanted, or none any more."""

    wanted: Wanted


class Hello(Struct, tag="hello", array_like=True, frozen=True):
    """The engine is ready; numbers count from here."""

    facts: EngineFacts


class Beat(Struct, tag="beat", array_like=True, frozen=True):
    """The engine process lives."""

    steps: int
    stalled: float  # seconds that its loop has not turned although there is something to do, as in a long step
    stats: SchedulerStats


class News(Struct, tag="news", array_like=True, frozen=True):
    """What one step brought to one client."""

    deltas: list[Delta]
    stats: SchedulerStats


class Refused(Struct, tag="refused", array_like=True, frozen=True):
    request_id: str
    kind: Literal["request", "overload"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 1.0


class Lost(Struct, tag="lost", array_like=True, frozen=True):
    """The engine missed a frame of this client, or had given it up: it works on none of its requests any more."""


class View(Struct, tag="view", array_like=True, frozen=True):
    """The frame that was asked for."""

    frame: ViewFrame


Down = Ping | Add | Abort | ResetPrefixCache | Watch
Up = Hello | Beat | News | Refused | Lost | View
Item = TypeVar("Item")


class DownFrame(Struct, array_like=True, frozen=True):
    epoch: int
    number: int
    body: Down


class UpFrame(Struct, array_like=True, frozen=True):
    epoch: int
    number: int
    body: Up


def _plain(value: Any) -> int | float:
    """A default that nobody has set is a number of its own kind; on the way it becomes a plain one."""
    return int(value) if isinstance(value, int) else float(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_down = msgspec.msgpack.Decoder(DownFrame)
_up = msgspec.msgpack.Decoder(UpFrame)


def encode(frame: DownFrame | UpFrame) -> bytes:
    return _encoder.encode(frame)


def decode_down(frame: bytes) -> DownFrame | None:
    return _decoded(_down, frame)


def decode_up(frame: bytes) -> UpFrame | None:
    return _decoded(_up, frame)


def _decoded(decoder: "msgspec.msgpack.Decoder[Item]", frame: bytes) -> Item | None:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        logger.warning("Dropped a frame of %d bytes between API and engine that is not a message: %s", len(frame), str(error)[:200])
        return None


def frame_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of the largest request there can be: a whole context of ids, a bias for every id, all of them allowed, texts beside it."""
    return 5 * max(config.max_model_len or 0, model.max_position) + 20 * model.vocab_size + TEXTS
