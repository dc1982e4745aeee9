"""A server that speaks as much of OpenAI's API as a client asks for, to a script: what it says, when, and where it cuts its bytes."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

NO_CHUNK: list[tuple[float, dict[str, Any]]] = []


@dataclass
class Script:
    """The answer to one request: events with the pause before each, or a status and what is wrong."""

    events: list[tuple[float, dict[str, Any]]] = field(default_factory=lambda: NO_CHUNK)
    status: int = 200
    error: dict[str, Any] | None = None
    cut_after: bool = False  # the connection is closed before [DONE]
    together: int = 1  # it begins when so many are in flight


def spoken(*pauses: float, field_name: str = "text") -> Script:
    """A token after each pause, and then the usage."""
    last = len(pauses) - 1
    events: list[tuple[float, dict[str, Any]]] = []
    for number, pause in enumerate(pauses):
        events.append((pause, {"choices": [{"index": 0, field_name: f" {number}", "finish_reason": "length" if number == last else None}]}))
    usage = {"prompt_tokens": 4, "completion_tokens": len(pauses)}
    return Script([*events, (0.0, {"choices": [], "usage": usage})])


class ScriptedServer:
    def __init__(self, answer: Callable[[dict[str, Any]], Script], models: tuple[str, ...] = ("m",), close_idle: bool = False) -> None:
        """`answer` gets the body of each POST."""
        self._answer = answer
        self._models = models
        self._close_idle = close_idle
        self.in_flight = self.most_in_flight = self.connections = self.left = 0
        self._arrival = asyncio.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result(10)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET /v1/models "):
                    body = {"object": "list", "data": [{"id": name} for name in self._models]}
                    await self._send(writer, _whole(200, body))
                else:
                    length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
                    script = self._answer(json.loads(await reader.readexactly(length)))
                    await self._play(script, reader, writer)
                if self._close_idle:
                    break
        writer.close()

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async with self._arrival:
                self._arrival.notify_all()
                await self._arrival.wait_for(lambda: self.most_in_flight >= script.together)
            if script.status != 200:
                await self._send(writer, _whole(script.status, {"error": script.error}))
                return
            await self._send(writer, b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for pause, event in script.events:
                await asyncio.sleep(pause)
                if reader.at_eof():
                    self.left += 1
                    return
                await self._send(writer, _chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
            if script.cut_after:
                writer.transport.abort()
                raise ConnectionResetError
            await self._send(writer, _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        finally:
            self.in_flight -= 1

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """In two pieces, cut where nobody would."""
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            writer.write(part)
            await writer.drain()


def _whole(status: int, body: object) -> bytes:
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
