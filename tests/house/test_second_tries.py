"""Only a test that measures time gets a second try: the marks are read, and the real conftest is run over a small suite."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest

from docs import second_tries, status
from tests.house.test_no_silent_skips import run_suite
from tests.support.fair_clock import FairClock, Machine

ROOT = Path(__file__).resolve().parents[2]
MOST = 60  # tests that may have a second try

UNSTEADY = """
import pathlib
import pytest

def fails_once(name):
    mark = pathlib.Path(__file__).with_suffix(name)
    if not mark.exists():
        mark.touch()
        raise AssertionError("the first time")

@pytest.mark.timed("a duration")
def test_timed(): fails_once(".timed")

def test_other(): fails_once(".other")
"""


def test_few_tests_get_a_second_try_each_for_a_reason_and_the_page_lists_them() -> None:
    tests, page = status.read_tests(ROOT / "tests"), second_tries.PAGE.read_text()
    found = second_tries.timed_tests(tests)
    assert list(second_tries.offences(tests)) == []
    assert 0 < len(found) <= MOST
    assert second_tries.written(page, found) == page, "run: python docs/second_tries.py"
    for name in ("pyproject.toml", "Makefile", ".ci/run"):
        assert not re.search(r"flaky|--reruns", (ROOT / name).read_text()), f"{name} grants second tries"


def test_every_way_to_a_second_try_is_found() -> None:
    bad = {
        "a.py": "@pytest.mark.timed()\ndef test_a(): ...",
        "b.py": "@pytest.mark.timed(REASON)\ndef test_b(): ...",
        "c.py": 'pytestmark = pytest.mark.timed("all of it")',
        "d.py": "@pytest.mark.flaky(reruns=3)\ndef test_d(): ...",
        "e.py": "def test_e():\n    clock = FairClock()",
    }
    for path, text in bad.items():
        assert any(path in offence for offence in second_tries.offences({path: text})), path
    assert list(second_tries.offences({"f.py": '@pytest.mark.timed("a pause")\ndef test_f():\n    FairClock()'})) == []


@pytest.mark.parametrize("tries", [2, 1])
def test_a_test_that_measures_time_gets_one_second_try_and_no_other_test_does(tries: int, tmp_path: Path) -> None:
    options = ("-p", "rerunfailures") if tries == 2 else ("-p", "no:rerunfailures")
    run = run_suite(tmp_path, "true", {"test_unsteady.py": UNSTEADY}, *options)
    assert ("1 failed, 1 passed, 1 rerun" if tries == 2 else "2 failed in") in run.stdout
    assert ("second try: test_unsteady.py::test_timed: AssertionError: the first time" in run.stdout) is (tries == 2)


@pytest.mark.parametrize(("others", "stretched"), [(0.0, 1), (0.25, 16 / 9), (0.99, 4)])
def test_a_busy_machine_stretches_a_bound_at_most_4_fold(others: float, stretched: float) -> None:
    """`others`: the share of the machine that other programs take."""
    with patch("tests.support.fair_clock.time.monotonic", lambda: now), patch("os.cpu_count", lambda: 2):
        now, taken = 0.0, 0.0
        with patch.object(Machine, "_now", lambda _: (taken, 0.0)):
            clock = FairClock()
            now, taken = 10.0, 20 * others
            assert clock.seconds() == pytest.approx(10 / stretched)
