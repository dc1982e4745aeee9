"""`Watch` follows the live view of a server; if the server goes away, it waits for it."""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.client.api import RemoteServer
from octavo.client.view import ViewState
from octavo.errors import RemoteError

PATH = "/v1/view"
SILENCE_SECONDS = 15.0  # a server says something every five
RETRY_SECONDS = 1.0
RECENT_SECONDS = 5.0  # what rates are over
MOST_BLOCKS = 2**24


@dataclass(slots=True)
class Counts:
    """Sums over all steps that were told of: the state keeps only the last few hundred."""

    prompt: int = 0  # tokens computed
    output: int = 0
    preempted: int = 0
    found: int = 0  # prompt tokens in the cache
    asked: int = 0  # of so many
    recent: deque[tuple[float, int, int]] = field(default_factory=deque)  # when, and prompt and output by then

    def add(self, steps: Iterable[list[Any]]) -> None:
        for _, _, _, prompt, output, _, _, _, _, preempted, found, asked in steps:
            self.prompt += prompt
            self.output += output
            self.preempted += preempted
            self.found += found
            self.asked += asked

    def note(self, at: float) -> None:
        self.recent.append((at, self.prompt, self.output))
        while at - self.recent[0][0] > RECENT_SECONDS:
            self.recent.popleft()

    def rates(self) -> tuple[float, float]:
        """Prompt and output tokens a second."""
        (start, *before), (end, *now) = (self.recent[0], self.recent[-1]) if self.recent else ((0.0, 0, 0), (0.0, 0, 0))
        prompt, output = ((late - early) / max(end - start, 1e-3) for early, late in zip(before, now))
        return prompt, output


class Watch:
    def __init__(self, server: RemoteServer, comes_back: bool) -> None:
        self.address = str(server.address)
        self.state = ViewState()
        self.told = asyncio.Event()  # the state is one
        self.trouble: str | None = None  # why it is out of date
        self.counts = Counts()
        self._server = server
        self._comes_back = comes_back

    async def run(self) -> None:
        """Until it is cancelled, or there is nothing to wait for."""
        while True:
            try:
                await self._follow()
                trouble = RemoteError(f"the server at {self.address} has closed the view")
            except RemoteError as error:
                trouble = error
            loads, went = trouble.status == 503, trouble.status is None and self.told.is_set()
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

                await self._server.follow(PATH, take)
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
            if not self.told.is_set():
                self.counts.add(frame["steps"])  # later ones tell again what is counted
            self.counts.recent.clear()
            self.told.set()
            self.trouble = None
        elif frame["kind"] == "delta":
            self.counts.add(frame.get("steps", ()))
        if frame["kind"] in ("full", "delta"):
            self.counts.note(frame["at"])
