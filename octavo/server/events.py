"""Server-sent events, and clients that go away.

Text is written as ASCII JSON: lines of an event end at line feeds alone, but many clients also split at U+2028 and the like.
Everything of one news list leaves in one write.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import answer_for, error_response

DONE = "data: [DONE]\n\n"
MOST_STALL = 60.0  # seconds a client may leave a full connection unread

Result = TypeVar("Result")


def event(data: object, name: str | None = None) -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work`; when the client goes away it is cancelled, which ends what it asked of the engine: ClientDisconnect."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what `events` yields. What goes wrong before the first of them is an ordinary answer, after it an event."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, receive, send))
        finally:
            await self._events.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events)
        except Exception as error:
            await error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await _write(send, first)
            async for events in self._events:
                await _write(send, events)
        except ClientDisconnect:
            raise
        except Exception as error:
            await _write(send, event(answer_for(error).body) + DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, text: str) -> None:
    try:
        async with asyncio.timeout(MOST_STALL):
            await send({"type": "http.response.body", "body": text.encode("ascii"), "more_body": True})
    except TimeoutError:  # it does not read: there is nobody to tell
        raise ClientDisconnect from None
