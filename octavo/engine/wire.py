"""Messages between an API process and the engine process: one msgpack frame each, decoded into exactly these types.

    API process  --  Ping, Add, Abort, ResetPrefixCache, Unpin, Watch, Drain  -->  engine process      DEALER to ROUTER over a unix socket
                <--  Hello, Heartbeat, `Updates`, Refused, Lost, View, Cached, Pinned --

A frame carries an epoch and a number. The epoch says to which start of the engine it belongs. The number counts the frames of one
client in one direction, so that a gap shows a loss. Bytes that are not a frame are dropped and logged.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from octavo.config import EngineConfig
from octavo.inspector.frames import ViewFrame, Wanted
from octavo.log import logger
from octavo.messages import AddRequest, CacheChange, Delta, EngineFacts, PinState, RankNumbers, SchedulerStats
from octavo.model_config import ModelConfig

TEXTS = 1 << 20  # bytes
LARGE = 256  # tokens with logprobs in one frame, so that a reader is not busy for long with one


class Ping(Struct, tag="ping", array_like=True, frozen=True):
    """A client is connected and refers to this epoch. 0: it knows none."""

    pid: int


class Add(Struct, tag="add", array_like=True, frozen=True):
    request: AddRequest
    moved: bool = False  # another engine had accepted it, so it is not refused if the queue is full


class Abort(Struct, tag="abort", array_like=True, frozen=True):
    request_id: str
    index: int | None = None  # of the sample; None: all


class ResetPrefixCache(Struct, tag="reset", array_like=True, frozen=True):
    pass


class Unpin(Struct, tag="unpin", array_like=True, frozen=True):
    """A pinned prefix is no longer needed."""

    pin_id: str


class Drain(Struct, tag="drain", array_like=True, frozen=True):
    """The engine is to be replaced. Its heartbeats inform all clients, so that they send it no new requests."""


class Watch(Struct, tag="watch", array_like=True, frozen=True):
    """The client requests one frame of the view, or no more frames."""

    wanted: Wanted


class Hello(Struct, tag="hello", array_like=True, frozen=True):
    """The engine is ready. Frames are numbered from here."""

    facts: EngineFacts


class Heartbeat(Struct, tag="beat", array_like=True, frozen=True):
    """The engine process is alive."""

    steps: int
    stalled: float  # seconds that its loop has not turned although there is work, as in a long step
    stats: SchedulerStats
    ranks: list[RankNumbers] = []  # if there are several
    draining: bool = False  # it accepts no new requests


class Updates(Struct, tag="updates", array_like=True, frozen=True):
    """The updates of one step for one client."""

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
    """The engine missed a frame of this client, or dropped the client. It has dropped all of its requests."""


class View(Struct, tag="view", array_like=True, frozen=True):
    """The requested frame."""

    frame: ViewFrame


class Cached(Struct, tag="cached", array_like=True, frozen=True):
    """The content of the engine's cache, or its changes since the last such message."""

    change: CacheChange


class Pinned(Struct, tag="pinned", array_like=True, frozen=True):
    """All prefixes that the engine holds or computes."""

    pins: list[PinState]


Down = Ping | Add | Abort | ResetPrefixCache | Unpin | Watch | Drain
Up = Hello | Heartbeat | Updates | Refused | Lost | View | Cached | Pinned
Item = TypeVar("Item")


# -- what the router's thread hands to the loop of the engine process: messages, and what happens to clients


@dataclass(frozen=True, slots=True)
class Gone:
    """A client was dropped."""

    name: str


@dataclass(frozen=True, slots=True)
class Watching:
    """A client starts or stops watching the engine."""

    name: str
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Met:
    """A client has been informed that the engine is ready, or that its requests are lost. It is sent what the engine holds."""

    name: str


Command = AddRequest | Abort | ResetPrefixCache | Unpin | Gone | Watching | Met


# -- frames


class DownFrame(Struct, array_like=True, frozen=True):
    epoch: int
    number: int
    body: Down


class UpFrame(Struct, array_like=True, frozen=True):
    epoch: int
    number: int
    body: Up


def _plain(value: Any) -> int | float:
    """Returns a plain number for a default that the user has not set, which is an instance of its own class."""
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


def sliced(deltas: list[Delta]) -> Iterator[list[Delta]]:
    """Yields the updates of a step in one frame, or in several if they are large, such as the logprobs of a long prompt."""
    pieces = [delta for delta in deltas if delta.prompt_logprobs is not None]
    for delta in pieces:
        assert delta.prompt_logprobs is not None
        start, found = delta.prompt_logprobs
        for at in range(0, len(found), LARGE):
            yield [replace(delta, prompt_logprobs=(start + at, found[at : at + LARGE]))]
    rest = [delta for delta in deltas if delta.prompt_logprobs is None] if pieces else deltas
    if rest:
        yield rest


def frame_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Returns the bytes of the largest possible request: a whole context of ids, a bias for every id, all ids allowed, and texts."""
    return 5 * max(config.max_model_len or 0, model.max_position) + 20 * model.vocab_size + TEXTS
