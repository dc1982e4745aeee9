"""What an operator sees of several engines: the view of each one, who is told what while one is dead, and how many may watch."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from octavo.errors import UnavailableError
from octavo.inspector.frames import ViewFrame
from octavo.inspector.hub import MOST_WATCHERS
from octavo.server.app import build_app
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.server.test_view import BODY, FAKE, FLAGS, Watching, engine_frames
from tests.support.http_server import HttpServer, wait_for
from tests.support.http_storm import WATCHED
from tests.support.server_process import ServerProcess
from tests.support.stand_in_llm import StandInLLM


class PairLLM(StandInLLM):
    """Two engines that show the same frame, and no more."""

    @property
    def replicas(self) -> "list[StandInLLM]":
        return [self, self]

    async def view(self, engine: int = 0) -> AsyncIterator[ViewFrame]:
        yield next(engine_frames(1))
        await asyncio.sleep(2)


@pytest.fixture
def pair(endless: str) -> Iterator[ServerProcess]:
    with ServerProcess(WATCHED, endless, *FLAGS, "-dp", "2", "--routing", "turns", env=FAKE) as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr[-3000:]


def names(watching: Watching) -> list[str]:
    """The requests that it has seen, in order."""
    return list(dict.fromkeys(seq["request"] for frame in watching.frames for seq in frame.get("seqs", ())))


def first_words(server: ServerProcess, path: str) -> str:
    """An answer up to the end of its first object: the stream of a view has no end."""
    with server.connect() as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n\r\n".encode())
        found = b""
        while b"}" not in found:
            found += sock.recv(65536)
    return found.decode()


# promise: engines-watched
def test_each_engine_is_watched_by_its_number_and_one_that_died_is_told(pair: ServerProcess) -> None:
    first, second = Watching(pair), Watching(pair, "?engine=1")
    assert [(each.state.head["engine"], each.state.head["engines"]) for each in (first, second)] == [(0, 2), (1, 2)]
    answers = [pair.ask("POST", "/v1/completions", BODY).json for _ in range(4)]
    wait_for(lambda: len(first.state.ended) == len(second.state.ended) == 2)
    assert names(first) == [answers[0]["id"], answers[2]["id"]] and names(second) == [answers[1]["id"], answers[3]["id"]]

    os.kill(pair.ask("GET", "/watch").json["engine_pid"], signal.SIGKILL)
    wait_for(lambda: pair.ask("GET", "/health").json["engines"] == {"ready": 1, "all": 2})
    assert "engine 0 is dead, 1 of 2 engines are ready" in first_words(pair, "/v1/view?engine=0")
    late = Watching(pair, "?engine=1")
    wait_for(lambda: late.state.ended == second.state.ended)  # an opening can be older than the requests: their lines follow it
    wait_for(lambda: first.kinds.count("head") == 2)
    assert not first.over and (first.state.head["engine"], first.state.head["epoch"]) == (0, 2), "who watches stays, and is told"
    assert second.kinds.count("head") == 1
    for each in (first, second, late):
        each.leave()


@pytest.mark.parametrize("number", ["2", "-1", "00", "+1", "1.0", "one", "", "%D9%A1", "9" * 5000])
def test_an_engine_that_does_not_exist_is_refused_with_the_range(number: str) -> None:
    with HttpServer(build_app(Server(PairLLM(), ServerConfig(data_parallel_size=2), "m"))) as server:  # type: ignore[arg-type]
        answer = server.http.get(f"/v1/view?engine={number}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "engine"
        assert "numbered from 0 to 1" in answer.json()["error"]["message"] and len(answer.text) < 300


def test_one_engine_has_the_number_0_and_its_head_does_not_tell_it() -> None:
    with HttpServer(build_app(Server(StandInLLM(), ServerConfig(), "m"))) as server:  # type: ignore[arg-type]
        refused = server.http.get("/v1/view?engine=1")
        assert (refused.status_code, "one engine, number 0" in refused.json()["error"]["message"]) == (400, True)
        lines = server.http.get("/v1/view?engine=0").text
        assert lines.startswith('{"kind":"head"') and '"engine' not in lines


def test_the_number_of_watchers_is_limited_over_all_engines() -> None:
    async def main() -> None:
        server = Server(PairLLM(), ServerConfig(data_parallel_size=2), "m")  # type: ignore[arg-type]
        streams = [server.views[number % 2].lines(True) for number in range(MOST_WATCHERS)]
        for stream in streams:
            assert (await anext(stream)).startswith(b'{"kind":"head"')
        for hub in server.views:
            with pytest.raises(UnavailableError, match="64 clients are watching already"):
                await anext(hub.lines(True))
        await streams[0].aclose()
        assert await anext(server.views[1].lines(True)), "there is room for one again, of any engine"
        for stream in streams:
            await stream.aclose()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 30))
