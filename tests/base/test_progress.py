"""Progress of long work: a line now and then where no terminal looks on, and nothing where nobody asked."""

import sys
import time

import pytest

from octavo import progress
from octavo.progress import DownloadProgress, GenerateProgress


# promise: progress-bar-tokens
def test_plain_lines_come_every_few_seconds_with_rates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with GenerateProgress(3, enabled=True) as shown:
        for now in (1.0, 4.0, 6.0, 7.0, 10.0, 12.0):
            shown.count(1 if now in (4.0, 12.0) else 0, tokens_in=20 if now == 4.0 else 0, tokens_out=5)
            shown.show()
    assert capsys.readouterr() == (
        "",
        "1/3 requests, in 3 tok/s, out 2 tok/s\n2/3 requests, in 2 tok/s, out 2 tok/s\n",
    )


def test_a_download_says_its_size_and_how_far_it_is_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with DownloadProgress("o/n", 2_340_000_000) as shown:
        for now in (1.0, 9.0, 11.0, 12.0, 20.0, 22.0):
            shown.update(390_000_000 if now < 22 else 0)
    with DownloadProgress("o/n", 94_300_000, enabled=False) as shown:
        now = 99.0
        shown.update(1)
    with pytest.raises(ZeroDivisionError), DownloadProgress("o/n", 94_300_000):
        raise ZeroDivisionError
    assert capsys.readouterr().err.splitlines() == [
        "downloading o/n, 2.3 GB",
        "downloading o/n, 50 % of 2.3 GB, 106 MB/s, 11 s left",
        "downloading o/n, 83 % of 2.3 GB, 89 MB/s, 4 s left",
        "downloaded o/n in 22 s",
        "downloading o/n, 94 MB",
    ]


def test_nothing_is_shown_when_it_is_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with GenerateProgress(3, enabled=False) as shown:
        now = 100.0
        shown.count(1, 1, 1)
        shown.show()
    assert capsys.readouterr() == ("", "")


# promise: progress-bar-tokens
@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_sees_a_bar_if_rich_is_installed(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for interval in ("LINE_EVERY", "REDRAW_EVERY"):
        monkeypatch.setattr(progress, interval, -1.0)
    monkeypatch.setenv("TERM", "xterm")
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with GenerateProgress(4, enabled=True) as shown:
        shown.count(3, 100, 50)
        shown.show()
        if rich:
            assert shown._bar is not None
            assert shown._bar.tasks[0].completed == 3 and "tok/s" in shown._bar.tasks[0].fields["rates"]
    out, err = capsys.readouterr()
    assert out == "" and ("generating" in err) == rich and ("3/4" in err)
