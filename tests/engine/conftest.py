"""Story models for the engine's tests: real text, 260,000 parameters, open in a moment.

Processes of engines and ranks are forked from one that has imported their libraries. What is tried is what they do, not how each starts.
"""

import pytest

from tests.support.forked import fork_children_of
from tests.support.story_folder import story_folder


@pytest.fixture(autouse=True)
def engines_and_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children_of(monkeypatch, "octavo.engine.supervisor", "octavo.worker.host_ranks")


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(story_folder(tmp_path_factory.mktemp("stories") / "stories"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model, which nothing ends but its length."""
    return str(story_folder(tmp_path_factory.mktemp("endless") / "endless", end_ids=[]))
