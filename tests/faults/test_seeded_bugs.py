"""Mistakes people make in a paged engine are planted one by one: the suite must see every one of them."""

from pathlib import Path

import pytest

from tests.faults.seeded import BUGS, SeededBug, failures, plant


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_suite_sees_the_bug(bug: SeededBug, tmp_path: Path) -> None:
    found = failures(bug.caught_by, plant(bug, tmp_path / "tree"))
    assert found, f"{bug.caught_by} passes with the bug in"
    assert found[0].startswith(("AssertionError", "assert ", "Failed: DID NOT RAISE")), f"it broke instead of failing: {found[0]}"
