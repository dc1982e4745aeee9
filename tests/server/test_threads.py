"""Long work of some clients does not keep others waiting, and what a client that left has asked for is not done."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from octavo.server.turns import NUM_THREADS, Threads
from tests.support.fair_clock import FairClock
from tests.support.server_process import STAND_IN, Reply, ServerProcess

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
MOST_SECONDS = 3.0  # the work that was asked for takes several times as long


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(STAND_IN) as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr


def timed(server: ServerProcess, path: str, body: object) -> tuple[Reply, float]:
    clock = FairClock()
    return server.ask("POST", path, body), clock.seconds()


def left_by_their_clients(server: ServerProcess, path: str, body: object, count: int) -> None:
    data = json.dumps(body, ensure_ascii=False).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    socks = [server.connect() for _ in range(count)]
    for sock in socks:
        sock.sendall(head.encode() + data)
    for sock in socks:
        sock.close()


@pytest.mark.timed("how long a chat waits behind abandoned work")
def test_texts_of_clients_that_left_do_not_keep_a_chat_waiting(server: ServerProcess) -> None:
    assert timed(server, "/v1/chat/completions", CHAT)[0].status == 200
    left_by_their_clients(server, "/tokenize", {"prompt": "的一是在不了有和人这" * 50_000}, 40)
    time.sleep(0.5)  # all have been read
    reply, seconds = timed(server, "/v1/chat/completions", CHAT)
    assert reply.status == 200 and seconds < MOST_SECONDS
    reply, seconds = timed(server, "/tokenize", {"prompt": "Once"})
    assert reply.json["tokens"] == [1, 403] and seconds < 2 * MOST_SECONDS


class Client:
    """As much of a request as threads need: a way to hear that it left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_a_kind_of_work_that_is_all_busy_leaves_the_others_alone_and_forgets_who_left() -> None:
    async def main() -> None:
        threads, over, done = Threads(), threading.Event(), list[str]()
        stays, leaves = Client(), Client()
        busy = [asyncio.create_task(threads.run("long_texts", stays.request, over.wait)) for _ in range(NUM_THREADS["long_texts"])]
        waiting = [asyncio.create_task(threads.run("long_texts", each.request, lambda: done.append("ran"))) for each in (leaves, stays)]
        for kind in NUM_THREADS.keys() - {"long_texts"}:
            assert await asyncio.wait_for(threads.run(kind, stays.request, lambda: 1), 60) == 1
        leaves.left.set()
        with pytest.raises(ClientDisconnect):
            await waiting[0]
        assert done == []
        over.set()
        await asyncio.gather(*busy, waiting[1])
        assert done == ["ran"]
        threads.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_large_work_freed_goes_back_to_the_system_once_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        threads, given_back = Threads(), threading.Semaphore(0)
        monkeypatch.setattr("octavo.server.turns.give_back_freed_memory", given_back.release)
        monkeypatch.setattr("octavo.server.turns.GIVE_BACK_SECONDS", 0.1)
        await threads.run("short_texts", Client().request, lambda: None)
        assert not await asyncio.to_thread(given_back.acquire, timeout=0.3), "a short text is no large work"
        for _ in range(3):
            await threads.run("bodies", Client().request, lambda: None)
        assert await asyncio.to_thread(given_back.acquire, timeout=60)
        assert not await asyncio.to_thread(given_back.acquire, timeout=0.3), "once for the three of them"
        threads.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.timed("the answer comes before the rest that follows it")
def test_the_thread_of_bodies_rests_between_two_as_long_as_the_first_took_and_nobody_waits_for_the_last_rest() -> None:
    async def main() -> None:
        threads, times = Threads(), list[tuple[float, float]]()

        def work() -> float:
            start = time.monotonic()
            time.sleep(0.3)
            times.append((start, time.monotonic()))
            return times[-1][1]

        one, two = await asyncio.gather(*(threads.run("bodies", Client().request, work) for _ in range(2)))
        assert time.monotonic() - two < 0.2, "the answer does not wait for the rest"
        (start, end), (again, _) = times
        assert (one, two) == (end, times[1][1]) and again - end >= 0.99 * (end - start)
        threads.close()

    asyncio.run(asyncio.wait_for(main(), 60))
