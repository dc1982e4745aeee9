"""Ranks are forked from a process that has imported torch: what is tried is what they do together, not how each starts."""

import pytest

from tests.support.forked import ForkingSubprocess


@pytest.fixture(autouse=True)
def ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.worker import host_ranks

    monkeypatch.setattr(host_ranks, "subprocess", ForkingSubprocess())
