"""The log: one handler however often it is set up."""

import logging
import re

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
