"""Ranks are forked from a process that has imported torch: what is tried is what they do together, not how each starts."""

import pytest

from tests.support.forked import fork_children_of


@pytest.fixture(autouse=True)
def ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children_of(monkeypatch, "octavo.worker.host_ranks")
