"""From the ready line to the exit code: states are told, SIGTERM drains, a second signal stops at once, a dead engine is no success."""

import asyncio
import json
import re
import signal
import socket
import threading
from unittest.mock import AsyncMock

import httpx2 as httpx
import pytest

from octavo.config import EngineConfig
from octavo.engine.async_llm import State
from octavo.errors import ConfigError, OctavoError
from octavo.server.app import build_app
from octavo.server.listen import bind
from octavo.server.run import ApiProcess
from octavo.server.siblings import Siblings, SpawnConfig
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.support.engine_process import PATIENCE
from tests.support.http_server import wait_for
from tests.support.server_process import STAND_IN, Reply, ServerProcess, read_replies
from tests.support.stand_in_llm import StandInLLM

WORDS = 60  # three seconds of an answer


class Streams:
    """Requests whose answers have begun, each of `words` words, 50 ms apart."""

    def __init__(self, server: ServerProcess, count: int, words: int) -> None:
        self.replies: list[Reply | Exception] = []
        self._begun = threading.Barrier(count + 1)
        self._threads = [threading.Thread(target=self._ask, args=(server, words)) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        self._begun.wait(PATIENCE)

    def _ask(self, server: ServerProcess, words: int) -> None:
        data = b'{"words": %d}' % words
        head = b"POST /slow HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        try:
            with server.connect() as sock:
                sock.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
                sock.recv(1, socket.MSG_PEEK)
                self._begun.wait(PATIENCE)
                self.replies += read_replies(sock)
        except Exception as error:
            self.replies.append(error)

    def ended(self) -> list[Reply | Exception]:
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.replies


# promise: shutdown-timeout, loading-draining-dead
def test_sigterm_lets_open_requests_end_and_takes_no_new_ones() -> None:
    with ServerProcess(STAND_IN) as server:
        streams = Streams(server, 20, WORDS)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ask("GET", "/health").json == {"status": "draining"})
        assert server.ask("GET", "/health").status == 503
        late = server.ask("POST", "/slow", {"words": 1})
        assert (late.status, late.error["type"], late.error["code"]) == (503, "server_error", "draining")
        assert int(late.headers["retry-after"]) >= 1
        replies = streams.ended()
        assert all(isinstance(reply, Reply) and reply.status == 200 and reply.body.count(b"word") == WORDS for reply in replies)
        assert len(replies) == 20 and server.ended() == 0
        assert "SIGTERM" in server.stderr and "Traceback" not in server.stderr


# promise: shutdown-timeout
def test_what_does_not_end_in_time_is_cut_off() -> None:
    with ServerProcess(STAND_IN, "--shutdown-timeout", "0.3") as server:
        streams = Streams(server, 2, 400)
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 0
        assert all(isinstance(reply, Reply) and 0 < reply.body.count(b"word") < 400 for reply in streams.ended())


def test_a_second_signal_stops_at_once() -> None:
    with ServerProcess(STAND_IN) as server:
        streams = Streams(server, 2, 400)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ask("GET", "/health").status == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 1
        assert not any(isinstance(reply, Reply) and reply.body.count(b"word") == 400 for reply in streams.ended())


# promise: health, loading-draining-dead
@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
def test_health_tells_what_is_not_ready(state: State) -> None:
    async def ask() -> httpx.Response:
        app = build_app(Server(StandInLLM(state), ServerConfig(), "m"))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get("/health")

    reply = asyncio.run(ask())
    assert (reply.status_code, reply.json()) == (503, {"status": state})


@pytest.mark.parametrize("trouble", [RuntimeError("a bug"), ConfigError("a wrong setting")])
def test_whatever_keeps_it_from_starting_ends_the_server_and_is_told(trouble: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Also what nobody expected: else it would say for ever that it is loading."""

    async def main() -> int:
        llm = StandInLLM("loading")
        llm.start = AsyncMock(side_effect=trouble)  # type: ignore[method-assign]
        server, listener = Server(llm, ServerConfig(), "m"), bind("127.0.0.1", 0)  # type: ignore[arg-type]
        siblings = Siblings(SpawnConfig(EngineConfig(), server.config, "", ""), listener, server.observer.numbers)
        return await asyncio.wait_for(ApiProcess(server, listener, siblings).run_to_end(), 60)

    with pytest.raises(OctavoError) as failed:
        asyncio.run(main())
    if isinstance(trouble, OctavoError):
        assert failed.value is trouble and not caplog.records
    else:
        assert str(failed.value) == "the server could not start: RuntimeError: a bug" and "Traceback" in caplog.text


# promise: log-format-text
def test_log_lines_are_objects_where_asked_for_and_a_dead_engine_ends_the_server_with_a_code() -> None:
    with ServerProcess(STAND_IN, "--log-format", "json", "--enable-log-requests") as server:
        server.ask("GET", "/fail")
        server.wait_for(re.compile(r'"message": "GET /fail 500 '))
        lines = [line for line in server.stderr.splitlines() if not line.startswith("Octavo is ready")]
        logged = [json.loads(line) for line in lines]
        assert {entry["level"] for entry in logged} == {"INFO", "ERROR"} and all(entry["time"] > 1.7e9 for entry in logged)
        assert "no such thing" in next(entry["traceback"] for entry in logged if entry["level"] == "ERROR")
        server.ask("GET", "/die")
        assert server.ended() == 1
