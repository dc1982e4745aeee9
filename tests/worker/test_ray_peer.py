"""A rank on another node that sends nothing: stopped, waiting for a CPU, or gone with its node. A stand-in answers for Ray."""

import os
import signal
import subprocess
from typing import Any

import pytest

from octavo.child import is_stopped_here
from octavo.config import EngineConfig
from octavo.errors import RankLost
from octavo.messages import BEAT_SECONDS
from octavo.worker import ray_ranks
from octavo.worker.rank_process import RankOrders
from octavo.worker.ray_ranks import RayPeer
from tests.support.http_server import wait_for


class Call:
    """A method of an actor. Its answers come one after the other; None is one that does not come."""

    def __init__(self, answers: list[Any] | None = None) -> None:
        self._answers = answers or []

    def options(self, **settings: Any) -> "Call":
        return self

    def remote(self, *words: Any) -> list[Any]:
        """Returns a pending answer: what it will be, and how often a wait for it ends too early."""
        return self._answers.pop(0) if self._answers else [None, 10**9]


class Ray:
    def wait(self, pending: list[list[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        for each in pending:
            each[1] -= 1
        return [each for each in pending if each[1] < 0], []

    def get(self, pending: list[Any], timeout: float | None = None) -> Any:
        if pending[1] >= 0 or isinstance(pending[0], Exception):
            raise pending[0] or TimeoutError
        return pending[0]


class Actor:
    def __init__(self) -> None:
        self.tell, self.begin, self.hear = Call(), Call(), Call([[b"1234message", 5]])


def peer(*answers: list[Any]) -> RayPeer:
    """Its node gives these answers. The rank sends a message after five that it did not send in time."""
    orders = RankOrders(EngineConfig(model=""), "", "folder", "", 1, [], b"", 1.0, 60.0, None, "INFO", "text")
    asked = Call(list(answers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("threading.Thread.start", lambda self: None)  # the test is its listener
        return RayPeer(Ray(), Actor(), "10.0.0.2", asked.remote, orders, lambda peer, answer: None, lambda peer: None)


@pytest.mark.parametrize("answers", [[[False, 0], [False, 0]], [[RuntimeError("the node has died"), 0]], []])
def test_a_rank_that_is_silent_and_not_stopped_is_waited_for(answers: list[list[Any]]) -> None:
    assert peer(*answers)._next(60) == b"message"


def test_a_rank_that_its_node_calls_stopped_is_lost() -> None:
    lost = peer([False, 0], [True, 0])
    assert lost._next(60) is None
    with pytest.raises(RankLost, match=r"^rank 1 on 10.0.0.2 was stopped$"):
        raise lost.why()


def test_a_rank_that_sends_nothing_until_its_time_is_over_is_lost() -> None:
    lost = peer()
    assert lost._next(0) is None
    with pytest.raises(RankLost, match=r"^rank 1 on 10.0.0.2 did not answer for 60 s$"):
        raise lost.why()


def test_a_node_is_not_asked_while_messages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayPeer, "_is_stopped", None)
    busy = peer()
    busy._hear = Call([[b"1234first", 0], [b"1234second", 0]])  # type: ignore[assignment]
    assert [busy._next(60), busy._next(60)] == [b"first", b"second"]
    assert ray_ranks.ASK_SECONDS > 2 * BEAT_SECONDS


def test_a_process_is_stopped_until_it_goes_on() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        assert not is_stopped_here(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped_here(process.pid))
        os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: not is_stopped_here(process.pid))
        process.kill()
    assert not is_stopped_here(process.pid)
