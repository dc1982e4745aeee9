"""The log: one handler however often it is set up, and seconds for every phase."""

import logging
import re
import time

import pytest

from octavo import log


def test_a_second_set_up_changes_the_level_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(log.logger, "handlers", [])
    log.setup("info")
    log.logger.info("shown once")
    log.setup("ERROR")
    log.logger.warning("not shown")
    log.setup("WARNING")
    assert len(log.logger.handlers) == 1 and log.logger.level == logging.WARNING
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO shown once\n", capsys.readouterr().err)


def test_a_stopwatch_tells_laps_and_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 15.0, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    watch = log.Stopwatch()
    assert (watch.lap(), watch.lap(), watch.total()) == (2.0, 3.0, 6.0)
