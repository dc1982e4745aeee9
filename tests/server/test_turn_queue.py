"""Many requests at once: the event loop handles them in order of arrival, and turns between them, so that others are served."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from starlette.types import Message

from octavo.server import body, guard
from octavo.server.app import build_app
from octavo.server.state import Server
from octavo.server.turns import MOST_STARTS, SMALL_BYTES, TurnQueue
from octavo.server_config import ServerConfig
from tests.support.stand_in_llm import StandInLLM


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._count)

    def _count(self) -> None:
        self.number += 1
        self._next = self._loop.call_soon(self._count)

    def stop(self) -> None:
        self._next.cancel()


def test_a_turn_admits_a_certain_amount_in_order_and_nothing_for_those_that_left() -> None:
    async def main() -> None:
        turns, queue, admitted = Turns(), TurnQueue(10), list[tuple[int, int]]()

        async def enter(number: int, amount: int) -> None:
            await queue.enter(amount)
            admitted.append((number, turns.number))

        amounts = [4, 5, 1, 100, 3, 3, 3, 3, 10, 7]
        tasks = [asyncio.create_task(enter(number, amount)) for number, amount in enumerate(amounts)]
        await asyncio.sleep(0)
        tasks[8].cancel()
        await asyncio.wait(tasks)
        first = admitted[0][1]
        assert [number for number, _ in admitted] == [0, 1, 2, 3, 4, 5, 6, 7, 9]
        assert [turn - first for _, turn in admitted] == [0, 0, 0, 2, 3, 3, 3, 3, 4], "a future is done one turn before its task goes on"
        assert queue.enter(1).done() and not queue._waiting
        turns.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


async def post(app: Any, data: bytes, leaves: bool = False) -> int:
    """Sends a request to the application itself, with its whole body; then the client may leave. Returns the status, or 0."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    path, statuses, unread = "/v1/completions", list[int](), [data]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers, "client": ("127.0.0.1", 1), "server": None,
    }  # fmt: skip

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    await app(scope, receive, send)
    return statuses[0] if statuses else 0


# promise: burst-large-bodies
def test_the_loop_turns_between_two_large_bodies_and_a_small_one_passes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [json.dumps({"prompt": [number] * 16_384, "max_tokens": 1}).encode() for number in range(100, 120)]
    small = json.dumps({"prompt": [7], "max_tokens": 1}).encode()
    parsed, started = list[tuple[int, int]](), list[int]()  # the first id of the prompt, and the turn

    async def main() -> None:
        app, turns = build_app(Server(StandInLLM(), ServerConfig(), "m")), Turns()  # type: ignore[arg-type]
        parse, arrive = body._parsed, guard.arrive

        def note_parsed(data: bytes) -> dict[str, Any]:
            value = parse(data)
            parsed.append((value["prompt"][0], turns.number))
            return value

        def note_start(*args: Any) -> None:
            started.append(turns.number)
            arrive(*args)

        monkeypatch.setattr(body, "_parsed", note_parsed)
        monkeypatch.setattr(guard, "arrive", note_start)
        gone = post(app, json.dumps({"prompt": [8] * 16_384}).encode(), leaves=True)
        *statuses, last = await asyncio.gather(*(post(app, data) for data in (*large, *[small] * MOST_STARTS)), gone)
        assert set(statuses) == {200} and last == 0
        turns.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert min(map(len, large)) > SMALL_BYTES > len(small)
    assert 8 not in dict(parsed), "its client left while it waited"
    order, turns_of_large = [first for first, _ in parsed], [turn for first, turn in parsed if first != 7]
    assert [first for first in order if first != 7] == list(range(100, 120)), "in order of arrival"
    assert len(set(turns_of_large)) == len(large), "one in each turn"
    assert order.index(7) < 10 and order[-1] == 119, "a small body does not wait for large ones"
    assert max(Counter(started).values()) == MOST_STARTS and len(started) > MOST_STARTS, "requests start in several turns"
