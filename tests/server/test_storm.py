"""64 clients at once, three of ten leaving at any byte, one of ten in a hurry: all text is exact, and afterwards nothing is held."""

import asyncio

import pytest

from tests.support.http_storm import FLAGS, WATCHED, cases, held_at_rest, seconds_until_idle, storm, tool_cases
from tests.support.server_process import ServerProcess


def test_a_storm_of_clients_leaves_every_text_exact_and_nothing_behind(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = cases(endless, 60, monkeypatch)
    with ServerProcess(WATCHED, endless, *FLAGS, env={"OCTAVO_DEBUG": "runner=fake,check=1", "OCTAVO_LOG_LEVEL": "ERROR"}) as server:
        questions += tool_cases(server, 4)
        asyncio.run(storm(server, questions, 128, seed=1, leaving=0.0))
        before = held_at_rest(server)
        happened = asyncio.run(storm(server, questions, 1000, seed=2))
        seconds_until_idle(server, before)
        assert min(happened["left"], happened["streamed"], happened["whole"]) > 150, happened
        assert happened["called"] > 7 and happened["late"] + happened["cut off"] > 15, happened
        assert server.ask("GET", "/watch").json["preemptions"] > 0, "the pool was never short"
        assert "Traceback" not in server.stderr and "Error" not in server.stderr, server.stderr[-3000:]
