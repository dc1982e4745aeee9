"""Streams that are being read while something happens to their server."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.support.fair_clock import FairClock
from tests.support.http_client import Connection, choices_of, request_bytes
from tests.support.server_process import Reply, ServerProcess


@dataclass
class Ended:
    """How a stream ended, and how long after what happened, by a fair clock."""

    reply: Reply | None  # None: the connection broke
    seconds: float

    @property
    def is_whole(self) -> bool:
        return self.reply is not None and self.reply.body.endswith(b"data: [DONE]\n\n") and b'"error"' not in self.reply.body

    @property
    def error_code(self) -> str | None:
        """Of the event that ended it."""
        assert self.reply is not None
        *_, last, done, _ = self.reply.body.decode().split("\n\n")
        assert done == "data: [DONE]"
        code: str | None = json.loads(last.removeprefix("data: "))["error"]["code"]
        return code


def story(tokens: int, number: int = 0) -> dict[str, object]:
    return {"prompt": [5, 6, number], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


def asked(tokens: int, number: int) -> tuple[str, dict[str, object]]:
    """Every fourth is a chat with tools, and time enough."""
    if number % 4 < 3:
        return "/v1/completions", story(tokens, number)
    tool = {"type": "function", "function": {"name": "sing", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": f"Once {number}"}]
    rest = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "tools": [tool], "timeout": 120}
    return "/v1/chat/completions", {"messages": messages, **rest}


async def while_streaming(server: ServerProcess, count: int, tokens: int, happens: Callable[[], Awaitable[None]]) -> list[Ended]:
    """All of them have begun when it happens."""
    begun, clock = asyncio.Semaphore(0), FairClock()

    async def stream(number: int) -> Ended:
        connection = Connection(server)
        try:
            path, body = asked(tokens, number)
            await connection.send(request_bytes(path, body | {"stream": True}))
            status, headers = await connection.head()
            pieces = [await connection.piece()]
            begun.release()
            while piece := await connection.piece():
                pieces.append(piece)
            return Ended(Reply(status, headers, b"".join(pieces)), clock.seconds())
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return Ended(None, clock.seconds())
        finally:
            connection.close()

    async def all_of_it() -> list[Ended]:
        nonlocal clock
        streams = [asyncio.create_task(stream(number)) for number in range(count)]
        for _ in streams:
            await begun.acquire()
        clock = FairClock()
        await happens()
        return list(await asyncio.gather(*streams))

    return await asyncio.wait_for(all_of_it(), 60)


def text(server: ServerProcess, tokens: int = 12) -> str:
    (choice,) = choices_of(server.ask("POST", "/v1/completions", story(tokens)))
    return choice[0]
