"""What goes wrong stays where it went wrong: aborts at any moment, rows that are not finite, a forward that fails."""

import pytest

from octavo.sampling_params import SamplingParams
from tests.support.fake import FakeEngine, sampling

PROMPT = [3 * i % 50 for i in range(11)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("point", ["between steps", "before forward", "after forward"])
def test_abort_at_every_step_and_point_frees_everything_and_disturbs_nobody(point: str, depth: int) -> None:
    moment = 0
    while True:
        engine = FakeEngine(block_size=4, rows=3, budget=6, depth=depth, num_blocks=14)
        for name in ("one", "two", "victim", "queued"):
            engine.add(name, PROMPT, sampling(8))
        for _ in range(moment):
            engine.step()
        over = ("victim", 0) in engine.ends
        if point == "between steps":
            engine.abort("victim")
        else:
            hooks = engine.executor.before_forward if point == "before forward" else engine.executor.after_forward
            hooks.append(lambda engine=engine: engine.abort("victim"))  # type: ignore[misc]
        engine.run()
        assert engine.abort("victim") == [] and engine.abort("nobody") == []
        engine.assert_exact({"victim"})
        engine.assert_idle()
        if over:
            return
        moment += 1


def test_an_aborted_id_can_be_used_again_while_its_step_is_in_flight() -> None:
    engine = FakeEngine(depth=2)
    engine.add("r", PROMPT, sampling(5))
    engine.step()
    engine.step()
    engine.core.abort("r")
    second = engine.add("r", PROMPT[::-1], sampling(5))
    engine.run()
    engine.assert_exact()
    assert second.life.finished is not None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("moment", range(6))
def test_a_row_that_is_not_finite_ends_its_own_request_and_poisons_no_cache(moment: int, depth: int) -> None:
    engine = FakeEngine(block_size=2, rows=4, budget=9, depth=depth)
    engine.add("bad", PROMPT, sampling(6, n=2))
    engine.add("good", [*PROMPT[:3], 9, 9, 9], sampling(6))
    for step in range(moment + 1):
        engine.faults.poison = {0} if step == moment else set()
        engine.step()
    engine.run()
    engine.assert_exact({"bad"})
    engine.assert_idle()
    assert {engine.reason("bad", 0), engine.reason("bad", 1)} == {"error"} and engine.reason("good") == "length"
    assert "numerical_error" in (engine.ends["bad", 0].error or "")
    engine.add("again", PROMPT, sampling(6, n=2))  # finds whatever the bad one left in the cache
    engine.run()
    engine.assert_exact({"bad"})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("entry", [-1, 0, 1])
@pytest.mark.parametrize("moment", [0, 1, 4])
def test_a_failing_forward_ends_the_requests_of_its_plan_only(moment: int, entry: int, depth: int) -> None:
    engine = FakeEngine(block_size=4, rows=2, budget=8, depth=depth)
    for name in ("a", "b", "queued 1", "queued 2"):
        engine.add(name, [*PROMPT[:2], ord(name[-1]) % 50], sampling(7))
    for step in range(moment + 1):
        engine.faults.raise_at = entry if step == moment else None
        engine.step()
    engine.run()
    engine.assert_exact({"a", "b"})
    engine.assert_idle()
    assert [engine.reason(name) for name in ("a", "b", "queued 1", "queued 2")] == ["error", "error", "length", "length"]
    assert "planted" in (engine.ends["a", 0].error or "")


def test_a_failing_forward_ends_a_request_that_only_moved_into_its_rows() -> None:
    """Its hit ends right before its last token: the plan that failed computed nothing for it, but should have written its row."""
    engine = FakeEngine(block_size=4)
    engine.add("warm", PROMPT[:9])
    engine.run()
    engine.add("forks", PROMPT[:9], sampling(4, n=2))
    engine.faults.raise_at = -1
    engine.step()
    assert not engine.executor.plans[-1].row and engine.reason("forks", 0) == engine.reason("forks", 1) == "error"
    engine.assert_idle()


def test_a_step_in_flight_is_taken_in_before_the_next_one_fails() -> None:
    engine = FakeEngine(depth=2)
    engine.add("one token", PROMPT, sampling(1))
    engine.step()
    engine.add("next", PROMPT[::-1])
    engine.faults.raise_at = -1
    engine.step()
    assert (engine.reason("one token"), engine.reason("next")) == ("length", "error")
    engine.assert_idle()


@pytest.mark.parametrize("moment", range(1, 9))
def test_a_preempted_request_keeps_its_token_in_flight(moment: int) -> None:
    """At depth 2 the victim's sampled token arrives after it lost its row: it is delivered once and computed again."""
    engine = FakeEngine(block_size=4, rows=2, depth=2)
    engine.add("first", PROMPT, sampling(12))
    second = engine.add("second", PROMPT[::-1], sampling(9))
    for _ in range(moment):
        engine.step()
    assert second.sequences[0].in_flight == 1
    engine.preempt_last()
    engine.step()
    assert len(engine.tokens["second", 0]) == moment, "the token in flight was lost or doubled"
    engine.run()
    engine.assert_exact()
    assert second.life.preemptions == 1
    engine.assert_idle()


def test_a_token_in_flight_may_end_a_preempted_request() -> None:
    engine = FakeEngine(block_size=4, rows=2, depth=2)
    engine.add("r", PROMPT, sampling(2))
    engine.step()
    engine.step()
    engine.preempt_last()
    engine.step()
    assert engine.reason("r") == "length" and len(engine.executor.plans) == 2
    engine.assert_exact()
    engine.assert_idle()


def test_stop_ids_end_a_sample_and_say_which_and_eos_says_nothing() -> None:
    engine = FakeEngine(end_ids=tuple(range(0, 50, 2)))
    odd = tuple(range(1, 50, 2))
    engine.add("eos", PROMPT, sampling(40))
    engine.add("either", PROMPT, sampling(40, stop=odd))
    engine.run()
    engine.assert_exact()
    last = engine.tokens["either", 0][-1]
    assert engine.reason("eos") == "stop" and engine.ends["eos", 0].stop_reason is None
    assert len(engine.tokens["either", 0]) == 1 and engine.ends["either", 0].stop_reason == (last if last in odd else None)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_a_minimum_length_counts_what_was_written_before_a_preemption(n: int, depth: int) -> None:
    """A worker that takes the output of a returning request for prompt would hold its end back too long."""
    engine = FakeEngine(end_ids=tuple(range(0, 50, 2)), preempt_every=2, depth=depth, rows=4)
    params = SamplingParams(n=n, min_tokens=12, max_tokens=40)
    life = engine.add("r", PROMPT, params).life
    engine.run()
    engine.assert_exact()
    assert life.preemptions > 2
    assert all(12 < len(engine.tokens["r", index]) < 20 for index in range(n))
