"""Story models for the engine's tests: real text, 260,000 parameters, open in a moment.

Engine processes are forked from one that has imported their libraries. What is tried is what they do, not how each starts.
"""

import pytest

from tests.support.forked import ForkingSubprocess
from tests.support.story_folder import story_folder

try:
    from octavo.engine import supervisor
except ModuleNotFoundError:  # a machine with a GPU may lack what a server needs: tests marked gpu do without
    supervisor = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def engines_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    if supervisor is not None:
        monkeypatch.setattr(supervisor, "subprocess", ForkingSubprocess())


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(story_folder(tmp_path_factory.mktemp("stories") / "stories"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model, which nothing ends but its length."""
    return str(story_folder(tmp_path_factory.mktemp("endless") / "endless", end_ids=[]))
