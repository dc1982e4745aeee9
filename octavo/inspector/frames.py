"""A frame of the view: what has changed in an engine since the last one, with token ids; and the line of JSON that is made of it.

`ViewStream` requests the frames of an engine for one reader, at most ten times a second. After a restart of the engine or a lost
message, the next frame is full.
"""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.errors import UnavailableError
from octavo.log import logger
from octavo.messages import RankFacts
from octavo.text.tokenizer import Tokenizer

PERIOD_SECONDS = 0.1
MOST_NAMES = 1024
RETRY_SECONDS = 30.0  # an engine that was restarted can be watched

Wanted = Literal["full", "delta", "none"]  # everything, the changes since the last frame, or no more frames
BlockState = tuple[int, int, int, str, list[int] | None, float | None]  # block, ref, sealed (1 + its pins), digest, ids so far, since
StepNumbers = tuple[int, float, float, int, int, int, int, int, int, int, int, int]
# step, at, ms, prefill_tokens, decode_tokens, rows, running, waiting, used_blocks, preempted, hit_tokens, query_tokens
StateNumbers = tuple[int, int, int, int]  # state slots of a recurrent model: all, live, checkpoints, pinned checkpoints
EventWords = tuple[int | float | str, ...]  # step, at, kind, and the fields of that kind


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence that is new, has changed or has ended. `table` has its entries from `start` on."""

    seq: int
    request: str
    sample: int
    samples: int  # of its request
    state: str
    prompt: int
    tokens: int
    limit: int  # the largest number of tokens, prompt and answer
    computed: int
    cached: int
    reason: str
    preemptions: int
    start: int
    table: list[int]
    digests: list[str] | None = None  # of its full blocks, if it has ended
    asked: list[int] | None = None  # of a waiting sequence: the last ids of its prompt, which are in no block yet
    kept: list[int] | None = None  # of a recurrent model: after how many of its tokens a state is kept


@dataclass(frozen=True, slots=True)
class ViewFrame:
    full: bool  # the reader forgets what came before
    at: float  # seconds after `started`
    started: float  # unix seconds
    blocks: list[BlockState] = field(default_factory=list)
    seqs: list[SequenceState] = field(default_factory=list)
    gone: list[tuple[int, str]] = field(default_factory=list)
    steps: list[StepNumbers] = field(default_factory=list)
    events: list[EventWords] = field(default_factory=list)
    lost: int = 0
    states: StateNumbers | None = None  # if they have changed
    error: str = ""  # why this frame is the last one, and empty


class ViewStream:
    def __init__(self, request: Callable[[Wanted], None]) -> None:
        """`request` sends what is wanted to the engine, or raises UnavailableError."""
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._wanted: Wanted = "full"
        self._answer: asyncio.Future[ViewFrame | None] | None = None
        self.names: dict[str, str] | None = None  # of requests that ended while a client watches

    async def frames(self) -> AsyncGenerator[ViewFrame, None]:
        """Yields frames forever. Leaving the iteration ends the watch. Raises if the engine can send no more."""
        self._wanted, self.names = "full", {}
        try:
            while True:
                frame = await self._next()
                if frame is not None:
                    yield frame
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            self.names = None
            self._say("none")

    def remember(self, request_id: str, name: str) -> None:
        """Keeps the name of a request that has ended here, because the frame with its end may still arrive."""
        if self.names is not None and name:
            self.names[request_id] = name
            if len(self.names) > MOST_NAMES:
                del self.names[next(iter(self.names))]

    def name(self, request_id: str) -> str | None:
        return (self.names or {}).get(request_id)

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
            self._request(wanted)
        except UnavailableError:
            logger.debug("the view cannot be asked for: the engine cannot be reached")
            return False
        return True


# -- a frame as a line of JSON (docs/view.md), on the text side. Token ids become text, which is left out for watchers that may not read it


def line(frame: Mapping[str, Any]) -> bytes:
    """Returns a frame as a line of JSON."""
    return msgspec.json.encode(frame) + b"\n"


def without_text(frame: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the frame without text. A block still shows how many tokens it holds."""
    hidden = dict(frame)
    if "blocks" in frame:
        hidden["blocks"] = [(*block[:4], None if block[4] is None else [""] * len(block[4]), block[5]) for block in frame["blocks"]]
    if "seqs" in frame:
        hidden["seqs"] = [{name: value for name, value in seq.items() if name != "asked"} for seq in frame["seqs"]]
    return hidden


class Line:
    """A frame, encoded when its first reader comes and kept for the others: once with text, once without."""

    __slots__ = ("_encoded", "_frame")

    def __init__(self, frame: Mapping[str, Any]) -> None:
        self._frame = frame
        self._encoded: dict[bool, bytes] = {}

    def read(self, with_text: bool) -> bytes:
        if with_text not in self._encoded:
            self._encoded[with_text] = line(self._frame if with_text else without_text(self._frame))
        return self._encoded[with_text]


class Pieces:
    """Finds the text of each token of a block. A character of several tokens belongs to the last of them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str | None] = {}  # None: its bytes are not whole characters

    def of(self, ids: list[int]) -> list[str]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [f"{token_id} " for token_id in ids]
        pieces = [self._known[token_id] if token_id in self._known else self._look_up(token_id, tokenizer) for token_id in ids]
        if None not in pieces:
            return pieces  # type: ignore[return-value]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found = [decoder.decode(tokenizer.token_bytes(token_id)) for token_id in ids]
        found[-1] += decoder.decode(b"", final=True)
        return found

    def _look_up(self, token_id: int, tokenizer: Tokenizer) -> str | None:
        try:
            piece: str | None = tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            piece = None
        self._known[token_id] = piece
        return piece


def delta(frame: ViewFrame, pieces: Pieces, name: Callable[[SequenceState], str]) -> dict[str, Any]:
    """Returns a frame as it is sent; a delta has no empty fields. `name`: gives the name of a sequence's request."""
    parts: dict[str, Any] = {
        "blocks": [(*block[:4], None if block[4] is None else pieces.of(block[4]), block[5]) for block in frame.blocks],
        "seqs": [_sequence(seq, name(seq), pieces) for seq in frame.seqs],
        "gone": frame.gone,
        "steps": frame.steps,
        "events": frame.events,
        "lost": frame.lost,
    }
    states = {} if frame.states is None else {"states": frame.states}
    if frame.full:
        return {"kind": "full", "at": frame.at, **parts, **states}
    return {"kind": "delta", "at": frame.at, **states, **{key: value for key, value in parts.items() if value}}


def _sequence(seq: SequenceState, request: str, pieces: Pieces) -> dict[str, Any]:
    ended = {} if seq.digests is None else {"digests": seq.digests}
    asked = {"asked": pieces.of(seq.asked)} if seq.asked else {}
    return {
        "seq": seq.seq,
        "request": request,
        "sample": seq.sample,
        "samples": seq.samples,
        "state": seq.state,
        "prompt": seq.prompt,
        "tokens": seq.tokens,
        "limit": seq.limit,
        "computed": seq.computed,
        "cached": seq.cached,
        "reason": seq.reason,
        "preemptions": seq.preemptions,
        "from": seq.start,
        "table": seq.table,
        **({} if seq.kept is None else {"checkpoints": seq.kept}),
        **ended,
        **asked,
    }


def rank_lines(ranks: Sequence[RankFacts]) -> list[dict[str, Any]]:
    """Returns the state of ranks, with their hosts if there are several."""
    several = len({one.host for one in ranks}) > 1
    return [_rank(one) | ({"host": one.host} if several else {}) for one in ranks]


def _rank(one: RankFacts) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "stage": one.stage,
        "stages": one.stages,
        "layers": [one.first_layer, one.num_layers],
        "cores": one.cores,
        "device": one.device,
        "kernels": one.kernels,
        "weight_bytes": one.weight_bytes,
    }
