"""A frame of the view: what has changed in an engine since the last one, with token ids. The text side makes lines of it (docs/view.md).

`ViewStream` requests the frames of an engine for one reader, at most ten times a second. After a restart of the engine or a lost
message, the next frame is full.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Literal

from octavo.errors import UnavailableError
from octavo.log import logger

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
