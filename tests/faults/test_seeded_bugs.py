"""Mistakes people make in a paged engine are planted one by one: the suite must see every one of them."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.seeded import BUGS, ROOT, Nursery, SeededBug, plant
from tests.support.soaked import one_in

EXERCISES = (ROOT / "docs/exercises.md").read_text()


def exercise(bug: SeededBug) -> str:
    """What docs/exercises.md says about it."""
    return EXERCISES.partition(f"\n### {int(bug.name[:2])}. ")[2].partition("\n##")[0]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text)


@pytest.mark.parametrize("bug", one_in(2, BUGS), ids=lambda bug: bug.name)
def test_the_suite_sees_the_bug(nursery: Nursery, bug: SeededBug, tmp_path: Path) -> None:
    found = nursery.failures(bug.caught_by, plant(bug, tmp_path / "tree"))
    assert found, f"{bug.caught_by} passes with the bug in"
    assert found[0].startswith(("AssertionError", "assert ", "Failed: DID NOT RAISE")), f"it broke instead of failing: {found[0]}"


def test_every_bug_still_fits_the_code() -> None:
    for bug in BUGS:
        tried = subprocess.run(["git", "apply", "--check", str(bug.path)], cwd=ROOT, capture_output=True, text=True)
        assert tried.returncode == 0, f"{bug.name} no longer fits the code, make it anew: {tried.stderr}"


@pytest.mark.parametrize("bug", one_in(2, [bug for bug in BUGS if bug.shown_by]), ids=lambda bug: bug.name)
def test_the_example_shows_the_bug_as_its_exercise_says(nursery: Nursery, bug: SeededBug, tmp_path: Path) -> None:
    shown = nursery.show(bug.shown_by, plant(bug, tmp_path / "tree"))
    assert shown.returncode == 1 and not shown.stderr, shown.stderr
    (symptom,) = re.findall(r"^```\n(.+)\n```$", exercise(bug), re.MULTILINE)
    assert without_numbers(symptom) in without_numbers(shown.stdout), shown.stdout
    assert len(bug.shown_by) == 1 or f"`python {' '.join(bug.shown_by)}`" in exercise(bug)


def test_every_bug_is_an_exercise_and_the_others_name_the_tests_that_fail() -> None:
    assert [int(bug.name[:2]) for bug in BUGS] == list(range(1, len(BUGS) + 1))
    assert len(re.findall(r"^### \d+\. ", EXERCISES, re.MULTILINE)) == len(BUGS)
    for bug in BUGS:
        assert bug.shown_by or bug.caught_by.partition("::")[0] in exercise(bug), bug.name


@pytest.mark.parametrize("depth", ["1", "2"])
def test_the_example_finds_nothing_wrong_without_a_bug(nursery: Nursery, depth: str) -> None:
    clean = nursery.show(["examples/fake_kv.py", "--check", "--depth", depth], ROOT)
    assert clean.returncode == 0 and "all as expected" in clean.stdout, clean.stdout + clean.stderr
