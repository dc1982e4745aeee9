"""Turns requests into answers: merges the updates of all prompts into one stream, collects or streams them, and counts the usage."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.async_llm import AsyncLLM
from octavo.errors import EngineError
from octavo.messages import AddRequest, LifeRecord
from octavo.outputs import TextDelta
from octavo.server.body import named
from octavo.server.errors import answer_for
from octavo.server.fields import StreamOptions
from octavo.server.records import Watch
from octavo.server.state import Server
from octavo.server.turns import disconnect, unless
from octavo.text.reasoning import ReasoningTokens

Updates = AsyncGenerator[list[TextDelta], None]


class Answer(Protocol):
    """An answer that a route can send as events or whole."""

    def events(self) -> AsyncGenerator[str, None]: ...

    async def whole(self) -> Response: ...


async def respond(request: Request, server: Server, answer: Answer, stream: bool | None) -> Response:
    if stream:
        return EventStream(answer.events())
    return await unless(disconnect(request.receive), answer.whole())


async def all_updates(
    llm: AsyncLLM, requests: Sequence[AddRequest], timeout: float, names: Mapping[str, str], watch: Watch
) -> Updates:
    """Yields the updates of all prompts, mixed. The index of a delta is that of its choice: prompt * n + sample. `names`: see `named`."""
    streams = [llm.generate(request, timeout, watch.id) for request in requests]
    with named(names), watch:
        async with aclosing(streams[0] if len(streams) == 1 else _mixed(streams, requests[0].params.n)) as updates:
            async for deltas in updates:
                for delta in deltas:
                    if delta.finish_reason in ("error", "abort"):
                        raise EngineError(delta.error or "the request was aborted", delta.code)
                watch.take(deltas)
                yield deltas


async def _mixed(streams: Sequence[Updates], n: int) -> Updates:
    queue: asyncio.Queue[list[TextDelta] | Exception | None] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_feed(queue, stream, number * n)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(queue: "asyncio.Queue[list[TextDelta] | Exception | None]", stream: Updates, first_index: int) -> None:
    try:
        async with aclosing(stream) as updates:
            async for deltas in updates:
                for delta in deltas:
                    delta.index += first_index
                await queue.put(deltas)
        await queue.put(None)
    except Exception as error:  # if one prompt fails, the request fails
        await queue.put(error)


class Tally:
    """Counts what a request used: tokens as OpenAI counts them, and time. A prompt counts once, however many samples it has."""

    def __init__(self, requests: Sequence[AddRequest], thinking: Sequence[ReasoningTokens] = ()) -> None:
        """`thinking`: a counter for each sample if the model thinks."""
        self._thinking = thinking
        self._n = requests[0].params.n
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._lives: list[LifeRecord | None] = [None] * len(requests)
        self._completion_tokens = 0

    def count(self, updates: Sequence[TextDelta]) -> None:
        for delta in updates:
            self._completion_tokens += len(delta.token_ids)
            if self._thinking:
                self._thinking[delta.index].push(delta.token_ids)
            if delta.life is not None:
                self._lives[delta.index // self._n] = delta.life

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return self._completion_tokens

    @property
    def cached_tokens(self) -> int:
        return sum(life.cached_tokens for life in self._lives if life is not None)

    @property
    def reasoning_tokens(self) -> int:
        return sum(thought.count for thought in self._thinking)

    def usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def timings(self) -> dict[str, object]:
        """Returns times in milliseconds, each the longest of all prompts, and why the first prompt's prefix hit ended."""
        spans = [_spans(life) for life in self._lives if life is not None]
        common = sum(life.common_tokens for life in self._lives if life is not None)
        queue, prefill, decode = (round(1000 * max(times), 3) for times in zip(*spans, strict=True)) if spans else (0.0, 0.0, 0.0)
        return {
            "queue_ms": queue,
            "prefill_ms": prefill,
            "decode_ms": decode,
            "cached_tokens": self.cached_tokens,
            **({"common_tokens": common} if common > self.cached_tokens else {}),
            "preemptions": sum(life.preemptions for life in self._lives if life is not None),
            "hit_reason": None if self._lives[0] is None else self._lives[0].hit_reason,
            **self._routed(),
        }

    def _routed(self) -> dict[str, object]:
        """Returns, if there are several engines, which one computed the first prompt last and why, and how often prompts moved."""
        first = self._lives[0]
        if first is None or not first.routing:
            return {}
        resumed = sum(life.resumed for life in self._lives if life is not None)
        return {"engine": first.engine, "routing": first.routing, "resumed": resumed}


def _spans(life: LifeRecord) -> tuple[float, float, float]:
    """Returns the seconds of queue, prefill and decode. A sample that this process ended has no end in its record: it ends now."""
    end = life.finished or time.monotonic()
    token = life.first_token or end
    start = life.first_scheduled or token
    return start - life.queued, token - start, end - token


class Frame:
    """Writes the JSON around the choices, of each chunk or of the whole answer."""

    def __init__(
        self, answer_id: str, kind: str, server: Server, seed: int | None, tally: Tally, options: StreamOptions | None, timings: bool
    ) -> None:
        self.head: dict[str, object] = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": server.model_name,
            "system_fingerprint": server.fingerprint,
            "seed": seed,
        }
        self._tally = tally
        self._timings = timings
        self._usage_last = options is not None and bool(options.include_usage)
        self._usage_always = self._usage_last and options is not None and bool(options.continuous_usage_stats)
        self._open = "data: " + json.dumps(self.head, separators=(",", ":"))[:-1] + ',"choices":['
        self._close = '],"usage":null}\n\n' if self._usage_last else "]}\n\n"

    def chunk(self, choice: str) -> str:
        close = f'],"usage":{json.dumps(self._tally.usage())}}}\n\n' if self._usage_always else self._close
        return self._open + choice + close

    def last_chunk(self) -> str:
        """Returns the chunk without choices that has usage and timings, or "" if the client did not ask for them."""
        if not (self._usage_last or self._timings):
            return ""
        usage = {"usage": self._tally.usage()} if self._usage_last else {}
        return f"{self._open[:-1]}[],{json.dumps(usage | self._timed())[1:]}\n\n"

    def whole(self, choices: Iterable[str]) -> Response:
        """Returns the answer around its choices, which are JSON already: writing all at once could stop the event loop for a second."""
        end = json.dumps({"usage": self._tally.usage(), **self._timed()})
        return Response(f"{self._open.removeprefix('data: ')}{','.join(choices)}],{end[1:]}", media_type="application/json")

    def _timed(self) -> dict[str, object]:
        return {"timings": self._tally.timings()} if self._timings else {}


async def chunk_events(
    updates: Updates, tally: Tally, frame: Frame, choices_of: Callable[[TextDelta], Iterable[str]]
) -> AsyncGenerator[str, None]:
    """Yields the chunks of each update list as one text. `choices_of` writes the choices of a delta as JSON."""
    async with aclosing(updates):
        async for deltas in updates:
            tally.count(deltas)
            if written := "".join([frame.chunk(choice) for delta in deltas for choice in choices_of(delta)]):
                yield written
    yield frame.last_chunk() + DONE


async def collect(updates: Updates, tally: Tally, take: Callable[[TextDelta], object]) -> None:
    """Counts all updates, and gives each delta to `take`."""
    async with aclosing(updates):
        async for deltas in updates:
            tally.count(deltas)
            for delta in deltas:
                take(delta)


# -- server-sent events
#
# Text is written as ASCII JSON: an event's lines end only at line feeds, but many clients also split at U+2028 and similar characters.
# All events of one list of updates are sent in one write. A client that does not read is disconnected by protocol.py.

DONE = "data: [DONE]\n\n"


def event(data: object, name: str | None = None) -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


class EventStream(Response):
    """Sends what `events` yields. An error before the first event is raised, and so an ordinary answer; a later one is an event."""

    def __init__(self, events: AsyncGenerator[str | bytes, None], media_type: str = "text/event-stream") -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless(disconnect(receive), self._send_all(send))
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        first = await anext(self._events)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._write(send, first)
            async for events in self._events:
                await self._write(send, events)
        except Exception as error:
            await self._write(send, event(answer_for(error).body) + DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, text: str | bytes) -> None:
        await send({"type": "http.response.body", "body": text.encode() if isinstance(text, str) else text, "more_body": True})
