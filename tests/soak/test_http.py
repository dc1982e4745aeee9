"""A server for long, on FakeKV: twenty thousand requests of clients that come and go, and its memory over two hundred thousand."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.http_memory import memory_slopes, watched
from tests.support.http_storm import cases, held_at_rest, seconds_until_idle, storm, tool_cases
from tests.support.story_folder import story_folder

BYTES_PER_REQUEST = 20  # a single forgotten object would be more


@pytest.mark.soak
def test_twenty_thousand_requests_leave_every_text_exact_and_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    folder = str(story_folder(tmp_path / "endless", end_ids=[]))
    questions = cases(folder, 300, monkeypatch)
    with watched(folder) as server:
        questions += tool_cases(server, 20)
        asyncio.run(storm(server, questions, 128, seed=1, leaving=0.0))
        before = held_at_rest(server)
        happened = asyncio.run(storm(server, questions, 20_000, seed=2))
        seconds = seconds_until_idle(server, before)
        record_property("storm", f"{dict(happened)}, idle after {seconds:.2f} s")
        assert seconds < 1 and "Traceback" not in server.stderr
        assert happened["called"] > 100 and min(happened["late"], happened["cut off"]) > 10, happened


@pytest.mark.soak
def test_memory_stays_level_over_two_hundred_thousand_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    folder = str(story_folder(tmp_path / "endless", end_ids=[]))
    questions = cases(folder, 100, monkeypatch)
    with watched(folder) as server:
        questions += tool_cases(server, 8)
        for process, slope in memory_slopes(server, questions, 50_000, 200_000).items():
            record_property(process, str(slope))
            assert slope.bytes_per_request < BYTES_PER_REQUEST, f"{process}: {slope}"
