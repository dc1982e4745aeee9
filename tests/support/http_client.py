"""A client of few words for many requests at once: bytes over asyncio, answers read whole, or left at any byte."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from tests.support.server_process import Reply, ServerProcess

PATIENCE = 0.3  # seconds without a byte: it has all there is


def request_bytes(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Connection:
    """Kept open from one request to the next."""

    def __init__(self, server: ServerProcess) -> None:
        self._place = server.host, server.port
        self._reader: asyncio.StreamReader | None = None

    async def _open(self) -> None:
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(*self._place)

    def close(self, at_once: bool = False) -> None:
        if self._reader is not None:
            self._writer.transport.abort() if at_once else self._writer.close()
            self._reader = None

    async def send(self, data: bytes) -> None:
        await self._open()
        self._writer.write(data)
        await self._writer.drain()

    async def ask(self, path: str, body: object) -> Reply:
        await self.send(request_bytes(path, body))
        return await self.reply()

    async def head(self) -> tuple[int, dict[str, str]]:
        assert self._reader is not None
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    async def piece(self) -> bytes:
        """The next of a stream; none at its end."""
        assert self._reader is not None
        size = int(await self._reader.readline(), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def reply(self) -> Reply:
        status, headers = await self.head()
        assert self._reader is not None
        if "content-length" in headers:
            return Reply(status, headers, await self._reader.readexactly(int(headers["content-length"])))
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return Reply(status, headers, b"".join(pieces))

    async def leave_after(self, data: bytes, num_bytes: int, at_once: bool) -> None:
        """So many bytes of the request and its answer, or as many as there are; then the client is gone."""
        await self.send(data[:num_bytes])
        left = num_bytes - len(data)
        assert self._reader is not None
        with suppress(TimeoutError):
            while left > 0:
                left -= len(await asyncio.wait_for(self._reader.read(left), PATIENCE))
        self.close(at_once)


def ask(server: ServerProcess, path: str, body: object) -> Reply:
    async def asked() -> Reply:
        connection = Connection(server)
        try:
            return await connection.ask(path, body)
        finally:
            connection.close()

    return asyncio.run(asyncio.wait_for(asked(), 30))


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Of a stream that ended as it should."""
    lines = body.decode("ascii").split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], body[-300:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def choices_of(reply: Reply, n: int = 1) -> list[tuple[str, str | None]]:
    """Text and end of every sample, streamed or not, of completions or chat. Calls of tools stand behind the text, each with its name."""
    found, error = answer_of(reply, n)
    assert error is None, reply
    return found


def answer_of(reply: Reply, n: int = 1) -> tuple[list[tuple[str, str | None]], str | None]:
    """The same, as far as it came, and the code of the error that ended it."""
    if reply.status != 200:
        return [("", None)] * n, reply.error["code"]
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return [(_said(each.get("message", each)), each["finish_reason"]) for each in reply.json["choices"]], None
    texts, calls, ends = [""] * n, [""] * n, [None] * n
    error: str | None = None
    for event in events_of(reply.body):
        assert error is None, "nothing comes after an error"
        if "error" in event:
            error = event["error"]["code"]
            continue
        for each in event["choices"]:
            index, delta = each["index"], each.get("delta", each)
            assert ends[index] is None, "nothing comes after the end"
            texts[index] += _said(delta | {"tool_calls": None})
            calls[index] += _said({"tool_calls": delta.get("tool_calls")})
            ends[index] = each["finish_reason"]
    return [(text + called, end) for text, called, end in zip(texts, calls, ends)], error


def _said(message: dict[str, Any]) -> str:
    """A message, a piece of one, or a choice of completions."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return (message.get("content") or message.get("text") or "") + "".join(
        each.get("name", "") + each.get("arguments", "") for each in functions
    )
