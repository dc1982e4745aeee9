"""Sending a workload to a server, each request when it is due, and noting when every piece of every answer came.

A piece is an event with text; a server may put several tokens into one, or hold a token back that is half a character.
Tokens are therefore counted by the server's own `usage`, and by pieces only where there is none.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from octavo.bench.workload import Ids, Workload
from octavo.client.api import RemoteServer
from octavo.errors import RemoteError
from octavo.progress import GenerateProgress

LOOK_EVERY = 0.5  # seconds between two looks at the progress


@dataclass(slots=True)
class Asked:
    """One request, as its client saw it. Times are seconds after the start of the run."""

    due: float
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)  # when each came
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # where the server says
    status: int | None = None  # of the answer, None where there was none
    error: str | None = None

    @property
    def first_token(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.pieces)]

    @property
    def per_token(self) -> float | None:
        return (self.ended - self.pieces[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def end_to_end(self) -> float:
        return self.ended - self.sent

    def as_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and how."""

    workload: Workload
    due: Sequence[float]
    model: str
    concurrency: int | None  # most requests in flight
    temperature: float


async def probe(server: RemoteServer, model: str, highest_id: int) -> None:
    """One small request, so that what is wrong with all of them is said once; it also wakes the server up."""
    await server.stream("/v1/completions", _body(model, [highest_id] * 4, 2, 0.0), lambda _now, _event: None)


async def drive(server: RemoteServer, load: Load) -> tuple[float, list[Asked]]:
    """Seconds from the first request to the end of the last, and what each of them saw."""
    asked = [Asked(due) for due in load.due]
    gate = asyncio.Semaphore(load.concurrency) if load.concurrency else contextlib.nullcontext()
    start = time.perf_counter()

    async def send(request: Asked, ids: Ids, wanted: int) -> None:
        async with gate:
            request.sent = time.perf_counter() - start
            await _ask(server, request, _body(load.model, ids, wanted, load.temperature), start)

    with GenerateProgress(len(asked), enabled=True) as progress:
        watch = asyncio.create_task(_watch(asked, progress))
        try:
            async with asyncio.TaskGroup() as group:
                for request, (ids, wanted) in sorted(zip(asked, load.workload.requests, strict=True), key=lambda pair: pair[0].due):
                    await asyncio.sleep(max(0.0, start + request.due - time.perf_counter()))
                    group.create_task(send(request, ids, wanted))
        finally:
            watch.cancel()
    return max(request.ended for request in asked), asked


def _body(model: str, ids: Ids, wanted: int, temperature: float) -> dict[str, object]:
    options = {"include_usage": True}
    return {"model": model, "prompt": ids, "max_tokens": wanted, "ignore_eos": True, "temperature": temperature, "stream_options": options}


async def _ask(server: RemoteServer, request: Asked, body: dict[str, object], start: float) -> None:
    def take(now: float, event: dict[str, Any]) -> None:
        for choice in event.get("choices") or ():
            request.ended = now - start
            if choice.get("text") or choice.get("finish_reason") is None:
                request.pieces.append(now - start)
        if usage := event.get("usage"):
            request.input_tokens, request.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            request.cached_tokens = details.get("cached_tokens")

    try:
        await server.stream("/v1/completions", body, take)
        if not request.pieces:  # not one character: its only moment is the end
            request.pieces.append(request.ended)
        request.status, request.output_tokens = 200, request.output_tokens or len(request.pieces)
    except RemoteError as error:
        request.status, request.error, request.ended = error.status, str(error), time.perf_counter() - start


async def _watch(asked: Sequence[Asked], progress: GenerateProgress) -> None:
    """Looks now and then, so that showing the progress costs the same however many tokens come."""
    shown = (0, 0, 0)
    while True:
        await asyncio.sleep(LOOK_EVERY)
        done = [request for request in asked if request.status is not None or request.error is not None]
        now = (len(done), sum(request.input_tokens for request in done), sum(len(request.pieces) for request in asked))
        progress.count(*(new - old for new, old in zip(now, shown, strict=True)))
        progress.show()
        shown = now
