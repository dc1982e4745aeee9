"""`Watch` follows the live view of one engine of a server. If the server goes away, it waits until it is back."""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.client.api import RemoteServer
from octavo.errors import RemoteError
from octavo.inspector.state import ViewState

PATH = "/v1/view"
SILENCE_SECONDS = 15.0  # a server sends something every five seconds
RETRY_SECONDS = 1.0
COUNT_SECONDS = 2.0  # how often the server is asked how many of its engines are ready
RECENT_SECONDS = 5.0  # rates are averages over this time
MOST_BLOCKS = 2**24


@dataclass(slots=True)
class Counts:
    """Sums over all steps since the start. `ViewState` keeps only the last few hundred steps."""

    prompt: int = 0  # tokens computed
    output: int = 0
    preempted: int = 0
    found: int = 0  # prompt tokens that were in the cache
    queried: int = 0  # prompt tokens that were looked up
    recent: deque[tuple[float, int, int]] = field(default_factory=deque)  # a time, and the values of `prompt` and `output` then

    def add(self, steps: Iterable[list[Any]]) -> None:
        for _, _, _, prompt, output, _, _, _, _, preempted, found, queried in steps:
            self.prompt += prompt
            self.output += output
            self.preempted += preempted
            self.found += found
            self.queried += queried

    def note(self, at: float) -> None:
        """Keeps the sums of this moment, for rates."""
        self.recent.append((at, self.prompt, self.output))
        while at - self.recent[0][0] > RECENT_SECONDS:
            self.recent.popleft()

    def rates(self) -> tuple[float, float]:
        """Returns prompt tokens and output tokens per second."""
        (start, *before), (end, *now) = (self.recent[0], self.recent[-1]) if self.recent else ((0.0, 0, 0), (0.0, 0, 0))
        prompt, output = ((late - early) / max(end - start, 1e-3) for early, late in zip(before, now))
        return prompt, output


class Watch:
    """What is known of a server."""

    def __init__(self, server: RemoteServer, comes_back: bool, engine: int = 0) -> None:
        """`comes_back`: whether to wait for a server that goes away. If not, that is an error."""
        self.address = str(server.address)
        self.state = ViewState()
        self.received = asyncio.Event()  # set when `state` has been received
        self.trouble: str | None = None  # why `state` is out of date
        self.counts = Counts()
        self.ready: tuple[int, int] | None = None  # how many engines are ready, and how many there are; None: not known
        self._path = PATH if engine == 0 else f"{PATH}?engine={engine}"
        self._server = server
        self._comes_back = comes_back

    async def run(self) -> None:
        """Follows the server until it is cancelled. Raises an error if waiting for the server is of no use."""
        counting = asyncio.create_task(self._count_engines())
        try:
            await self._follow_again_and_again()
        finally:
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)

    async def _count_engines(self) -> None:
        """Asks how many engines are ready, again and again, while the view tells that there are several."""
        await self.received.wait()
        while True:
            if "engines" in self.state.head:
                self.ready = await self._server.ready_engines()
            await asyncio.sleep(COUNT_SECONDS)

    async def _follow_again_and_again(self) -> None:
        while True:
            try:
                await self._follow()
                trouble = RemoteError(f"the server at {self.address} has closed the view")
            except RemoteError as error:
                trouble = error
            loads, went = trouble.status == 503, trouble.status is None and self.received.is_set()
            if not self._comes_back or not (loads or went):
                raise trouble
            self.trouble = str(trouble)
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SILENCE_SECONDS) as limit:

                def take(frame: dict[str, Any]) -> None:
                    self._take(frame)
                    limit.reschedule(loop.time() + SILENCE_SECONDS)

                await self._server.follow(self._path, take)
        except TimeoutError as error:
            raise RemoteError(f"the server at {self.address} has sent nothing for {SILENCE_SECONDS:.0f} seconds") from error
        except RemoteError as error:
            if error.status != 404:
                raise
            why = "it was started with --no-inspector, or it is not an Octavo server"
            raise RemoteError(f"{self.address} has no live view: {why}", 404) from error

    def _take(self, frame: dict[str, Any]) -> None:
        if frame["kind"] == "head" and not (frame["version"] == 1 and 2 <= frame["num_blocks"] <= MOST_BLOCKS):
            raise ValueError("a view of another version")
        self.state.apply(frame)
        if frame["kind"] == "full":
            if not self.received.is_set():
                self.counts.add(frame["steps"])  # later full frames repeat steps that were counted
            self.counts.recent.clear()
            self.received.set()
            self.trouble = None
        elif frame["kind"] == "delta":
            self.counts.add(frame.get("steps", ()))
        if frame["kind"] in ("full", "delta"):
            self.counts.note(frame["at"])
