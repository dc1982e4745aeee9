"""Server-sent events, and clients that go away. (A client that does not read is disconnected by protocol.py.)

Text is written as ASCII JSON: an event's lines end only at line feeds, but many clients also split at U+2028 and similar characters.
All events of one list of updates are sent in one write.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import answer_for

DONE = "data: [DONE]\n\n"

Result = TypeVar("Result")


def event(data: object, name: str | None = None) -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


async def unless(gone: Coroutine[Any, Any, None], work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. If `gone` ends first, cancels `work`, and with it its requests, and raises ClientDisconnect."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnect(receive: Receive) -> None:
    """Waits until the client goes away. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
