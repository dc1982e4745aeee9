"""Many watchers at once, of several keys: text for whoever may read it, one encoding for all, and an end of their number."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octavo.errors import UnavailableError
from octavo.inspector import hub
from octavo.inspector.frames import ViewFrame
from octavo.inspector.state import ViewState
from octavo.messages import EngineFacts, Limits
from octavo.server.app import build_app
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.server.test_view import ScriptedLLM, engine_frames
from tests.support.http_server import HttpServer, wait_for_async
from tests.support.stand_in_llm import StandInLLM

ONE, TWO, ADMIN = "sk-one", "sk-two", "sk-admin"
NUM_BLOCKS, BLOCK_SIZE = 8192, 16


class ShownLLM(StandInLLM):
    """An engine that shows a few frames, and no more."""

    async def view(self, engine: int = 0) -> AsyncIterator[ViewFrame]:
        for frame in engine_frames(12):
            yield frame
        await asyncio.sleep(0.3)


def watched(config: ServerConfig, key: str = "any") -> ViewState:
    state = ViewState()
    with HttpServer(build_app(Server(ShownLLM(), config, "m"))) as server:  # type: ignore[arg-type]
        reply = server.http.get("/v1/view", headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    for text in reply.text.splitlines():
        state.apply(json.loads(text))
    return state


def test_of_several_keys_only_the_admins_reads_text_and_others_see_the_same_blocks_without() -> None:
    several = ServerConfig(api_key=(ONE, TWO), admin_key=ADMIN)
    whole, alone, admin = watched(ServerConfig()), watched(ServerConfig(api_key=(ONE, ONE), admin_key=ADMIN), ONE), watched(several, ADMIN)
    assert any(any(tokens) for tokens in whole.tokens if tokens) and whole.head["text"] is True
    assert alone.tokens == admin.tokens == whole.tokens, "whoever is the only one reads what it wrote itself"
    for key in (ONE, TWO):
        other = watched(several, key)
        assert other.head["text"] is False
        assert other.tokens == [None if tokens is None else [""] * len(tokens) for tokens in whole.tokens]
        assert (other.ref, other.sealed, other.digests, other.seqs) == (whole.ref, whole.sealed, whole.digests, whole.seqs)
        assert [event[2:] for event in other.events] == [event[2:] for event in whole.events]


def test_of_several_keys_a_record_is_told_to_the_one_that_asked_and_to_the_admins() -> None:
    def statuses(config: ServerConfig, asks: str, *readers: str) -> list[int]:
        with HttpServer(build_app(Server(StandInLLM(), config, "m"))) as server:  # type: ignore[arg-type]
            as_ = [{"authorization": f"Bearer {key}"} for key in (asks, *readers)]
            answer = server.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2}, headers=as_[0]).json()
            return [server.http.get(f"/v1/requests/{answer['id']}", headers=reader).status_code for reader in as_[1:]]

    several = ServerConfig(api_key=(ONE, TWO), admin_key=ADMIN)
    assert statuses(several, ONE, ONE, TWO, ADMIN) == [200, 404, 200]
    assert statuses(several, ADMIN, ONE, TWO, ADMIN) == [404, 404, 200]
    assert statuses(ServerConfig(), ONE, ONE, TWO) == [200, 200]
    assert statuses(ServerConfig(api_key=(ONE,), admin_key=ADMIN), ADMIN, ONE) == [200]


def large_pool(at: float, full: bool) -> ViewFrame:
    """Every block is cached, and full of tokens."""
    told = range(1, NUM_BLOCKS) if full else range(1, 200)
    return ViewFrame(full, at, 0.0, [(block, 0, 1, "0123456789abcdef", [7] * BLOCK_SIZE, 0.5) for block in told])


@pytest.mark.timed("the longest pause of the event loop")
def test_all_who_come_at_once_are_served_from_one_encoding_and_too_many_are_told() -> None:
    async def main() -> None:
        llm = ScriptedLLM()
        llm.facts = EngineFacts("stand-in", 1, Limits(8, 64, 256, 512, NUM_BLOCKS, BLOCK_SIZE))
        server = Server(llm, ServerConfig(), "m")  # type: ignore[arg-type]
        llm.frames.put_nowait(large_pool(1.0, full=True))
        streams = [server.views[0].lines(True) for _ in range(300)]
        states = [ViewState() for _ in streams]
        refused: list[UnavailableError] = []
        pieces: list[dict[bytes, None]] = [{}, {}]  # different ones, in each round

        async def read(number: int, round_: int) -> None:
            try:
                piece = await anext(streams[number])
            except UnavailableError as error:
                refused.append(error)
                return
            pieces[round_][piece] = None
            if number in (0, 63):
                for text in piece.splitlines():
                    states[number].apply(json.loads(text))

        pauses: list[float] = []

        async def tick() -> None:
            while True:
                start = time.monotonic()
                await asyncio.sleep(0.005)
                pauses.append(time.monotonic() - start)

        ticking = asyncio.create_task(tick())
        await asyncio.gather(*(read(number, 0) for number in range(32)))
        for at in range(hub.YOUNG_LINES - 5):
            llm.frames.put_nowait(large_pool(2.0 + at, full=False))
        await wait_for_async(lambda: server.views[0]._number == hub.YOUNG_LINES - 4)
        await asyncio.gather(*(read(number, 0) for number in range(32, 300)))  # some lines later, from the same state
        await asyncio.gather(*(read(number, 1) for number in range(64)))  # the lines since, and the second half of the pool
        ticking.cancel()
        assert [len(different) for different in pieces] == [1, 1]
        assert len(refused) == 300 - hub.MOST_WATCHERS and "64 clients are watching already" in str(refused[0])
        assert states[0].tokens == states[63].tokens and sum(states[0].sealed) == NUM_BLOCKS - 1
        assert states[0].at == states[63].at == hub.YOUNG_LINES - 4
        assert max(pauses) < 1.0, f"the event loop stood still for {max(pauses):.1f} s"
        for stream in streams:
            await stream.aclose()
        await wait_for_async(lambda: llm.readers == 0 and not server.views[0]._openings)
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_inspector_that_failed_is_told_to_those_who_watch_and_those_who_come() -> None:
    class FailedLLM(ShownLLM):
        async def view(self, engine: int = 0) -> AsyncIterator[ViewFrame]:
            yield next(engine_frames(1))
            raise UnavailableError("the inspector failed", 30)

    class NeverLLM(ShownLLM):
        async def view(self, engine: int = 0) -> AsyncIterator[ViewFrame]:
            if self.state == "ready":
                raise UnavailableError("the inspector failed", 30)
            yield next(engine_frames(1))

    def asked(llm: Any) -> Any:
        with HttpServer(build_app(Server(llm, ServerConfig(), "m"))) as server:
            return server.http.get("/v1/view")

    assert asked(FailedLLM()).status_code in (200, 503), "it may have ended before the first line was read"
    reply = asked(NeverLLM())
    assert (reply.status_code, reply.json()["error"]["message"], reply.headers["retry-after"]) == (503, "the inspector failed", "30")
