"""The step loop when a step is cut short from outside: nothing it had learned is lost, and everything in it ends."""

from concurrent.futures import Future

import pytest

from octavo.engine.process import Loop
from octavo.errors import VerifyError
from octavo.inspector.engine_view import NoView
from octavo.messages import AddRequest, Delta, StepResult
from tests.support.fake import FakeEngine, sampling


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("moment", [1, 2, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt, VerifyError])
@pytest.mark.parametrize("hook", ["before_forward", "after_forward"])
def test_a_forward_that_is_cut_short_ends_its_requests_and_the_news_come_with_the_next_step(
    hook: str, error: type[BaseException], moment: int, depth: int
) -> None:
    engine = FakeEngine(block_size=4, rows=2, depth=depth)
    for name in ("a", "b", "queued"):
        engine.add(name, [ord(name[0]) % 50, *range(9)], sampling(8))

    def cut() -> None:
        raise error("planted")

    for _ in range(moment - 1):
        engine.step()
    getattr(engine.executor, hook).append(cut)
    with pytest.raises(error):
        engine.step()
    assert engine.core.has_work, "there is news to give out"
    engine.run()
    assert [engine.reason(name) for name in ("a", "b", "queued")] == ["error", "error", "length"]
    assert [len(engine.tokens[name, 0]) for name in ("a", "b")] == [moment - 1] * 2, "what earlier steps brought is given out"
    engine.assert_exact({"a", "b"})
    engine.assert_idle()


def test_news_of_a_cut_step_arrive_even_if_nothing_else_is_left() -> None:
    engine = FakeEngine()
    engine.add("only", [1, 2, 3])
    engine.executor.before_forward.append(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.core.has_work, "a client that asks whether to step would never hear of it"
    assert [delta.finish_reason for delta in engine.step()] == ["error"]
    assert not engine.core.has_work
    engine.assert_idle()


def fail_after_launch(engine: FakeEngine, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of step `failing` never comes: its future raises, as that of a lost device would."""
    sample = engine.executor.sample

    def sample_or_fail(masks: object) -> "Future[StepResult]":
        future = sample()
        if engine.executor.plans[-1].step == failing:
            future = Future()
            future.set_exception(RuntimeError("the device is gone"))
        return future

    monkeypatch.setattr(engine.executor, "sample", sample_or_fail)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_after_it_was_launched_ends_its_own_requests_alone(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(block_size=4, rows=2, depth=depth)
    for name in ("a", "b", "queued"):
        engine.add(name, [ord(name[0]) % 50, *range(9)], sampling(8))
    fail_after_launch(engine, 3, monkeypatch)
    engine.run()
    assert [engine.reason(name) for name in ("a", "b", "queued")] == ["error", "error", "length"]
    engine.assert_exact({"a", "b"})
    engine.assert_idle()


def test_samples_forked_from_a_step_that_failed_later_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample 0, the only one in the failed plan, was aborted before the fork; the others share what it never computed."""
    engine = FakeEngine(block_size=4, rows=4, depth=2)
    engine.add("a", list(range(13)), sampling(6, n=3))
    fail_after_launch(engine, 1, monkeypatch)
    engine.step()
    engine.abort("a", 0)
    engine.run()
    assert [engine.reason("a", index) for index in range(3)] == ["abort", "error", "error"]
    assert not engine.scheduler.kv.pool.index, "blocks that were never computed can be found"
    engine.assert_idle()


# --- what other threads read -----------------------------------------------------------------------------------------


def test_a_snapshot_of_the_statistics_stays_as_it_was() -> None:
    engine = FakeEngine()
    engine.add("a", list(range(9)), sampling(6))
    taken = [(snapshot := engine.scheduler.snapshot(), repr(snapshot))]
    while engine.core.has_work:
        engine.step()
        taken.append((snapshot := engine.scheduler.snapshot(), repr(snapshot)))
    assert [repr(snapshot) for snapshot, _ in taken] == [then for _, then in taken]
    assert [sum(snapshot.steps) for snapshot, _ in taken] == list(range(len(taken)))


class Listener:
    """A router whose thread comes late to what it was given."""

    def __init__(self) -> None:
        self.given: list[Delta] = []

    def take(self, wait: bool, seconds: float | None) -> list[AddRequest]:
        return []

    def publish(self, status: object) -> None:
        pass

    def show(self, views: object) -> None:
        pass

    def give(self, deltas: list[Delta], refused: object, stats: object) -> None:
        self.given += deltas


def test_what_is_given_out_of_a_request_is_not_written_on_afterwards() -> None:
    engine, router = FakeEngine(), Listener()
    loop = Loop(engine.core, router, None, NoView(), 0.0)  # type: ignore[arg-type]
    engine.add("a", list(range(9)), sampling(6))
    while engine.core.has_work:
        loop.turn()
    first, last = [delta.life for delta in router.given if delta.life is not None]
    assert first.finished is None and last.finished is not None
