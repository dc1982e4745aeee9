"""n samples of one prompt: forked by reference before its last token, a shared block copied by whoever writes it first."""

import pytest

from octavo.errors import RequestError
from tests.support.fake import FakeEngine, sampling

SIZE, SAMPLES, COUNT = 4, 3, 6
TAILS = [0, 1, SIZE - 1]  # (prompt length - 1) mod block size
HITS = ["full", "partial", "none"]
EARLY = 9  # steps in which everything of a request's beginning happens


def _prompt(tail: int) -> list[int]:
    return list(range(10, 10 + 2 * SIZE + tail + 1))


def _engine(tail: int, hit: str, depth: int, num_blocks: int = 64) -> FakeEngine:
    """An engine with nothing at work and as much of the prompt in its cache as `hit` says; it chunks by 3 tokens."""
    engine = FakeEngine(block_size=SIZE, depth=depth, rows=4, budget=5, num_blocks=num_blocks)
    warm = {"full": _prompt(tail), "partial": _prompt(tail)[: SIZE + 1] + [1, 2, 3], "none": [1, 2, 3]}[hit]
    engine.add("warm", warm, sampling(1))
    engine.run()
    engine.executor.plans.clear()
    engine.runner.num_computed = 0
    return engine


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("tail", TAILS)
def test_fork_computes_the_prompt_once_and_copies_only_a_shared_block(tail: int, hit: str, depth: int) -> None:
    engine = _engine(tail, hit, depth)
    request = engine.add("r", _prompt(tail), sampling(COUNT, SAMPLES))
    engine.run()
    engine.assert_exact()
    engine.assert_idle()
    assert len({tuple(engine.tokens["r", index]) for index in range(SAMPLES)}) == SAMPLES, "each sample has its own noise"
    cached = {"full": 2 * SIZE, "partial": SIZE, "none": 0}[hit]
    assert request.life.cached_tokens == cached
    assert engine.runner.num_computed == len(_prompt(tail)) - 1 - cached + SAMPLES * COUNT
    assert engine.copies == (SAMPLES - 1 if tail else 0), "the last sharer writes in place"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("tail", TAILS)
def test_fork_survives_preemption_at_any_step(tail: int, hit: str, depth: int) -> None:
    preemptions = 0
    for moment in range(EARLY):
        engine = _engine(tail, hit, depth)
        request = engine.add("r", _prompt(tail), sampling(COUNT, SAMPLES))
        for step in range(EARLY):
            if step == moment:
                engine.preempt_last()
            engine.step()
        engine.run()
        engine.assert_exact()
        engine.assert_idle()
        preemptions += request.life.preemptions
    assert preemptions >= EARLY // 2, "the test hardly preempted anything"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("tail", TAILS)
def test_fork_survives_the_abort_of_any_sample_at_any_point(tail: int, hit: str, depth: int) -> None:
    for moment in range(EARLY):
        for point in range(3):
            index = (moment + point) % SAMPLES
            engine = _engine(tail, hit, depth)
            engine.add("r", _prompt(tail), sampling(COUNT, SAMPLES))
            for step in range(EARLY):
                if step == moment:
                    hooks = [engine.executor.before_forward, engine.executor.after_forward]
                    if point < 2:
                        hooks[point].append(lambda engine=engine, index=index: engine.abort("r", index))  # type: ignore[misc]
                    else:
                        engine.abort("r", index)
                engine.step()
            engine.run()
            engine.assert_exact({"r"})
            engine.assert_idle()
            others = [at for at in range(SAMPLES) if at != index]
            assert [engine.reason("r", at) for at in others] == ["length"] * 2 and engine.reason("r", index) in ("abort", "length")


@pytest.mark.parametrize("index", range(SAMPLES))
def test_the_row_of_a_sample_aborted_before_the_fork_is_written_once_by_whoever_gets_it_next(index: int) -> None:
    engine = FakeEngine(block_size=SIZE, rows=SAMPLES, budget=64)
    engine.add("r", _prompt(1), sampling(COUNT, SAMPLES))
    engine.add("next", [1, 2, 3], sampling(COUNT))  # it waits for a row
    engine.step()
    engine.abort("r", index)
    engine.run()
    engine.assert_exact({"r"})
    engine.assert_idle()
    forked = [plan for plan in engine.executor.plans if plan.row_forks]
    assert len(forked) == 1 and len(forked[0].row_writes) == 1, "both happened in one plan"


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_that_outgrow_the_pool_finish_one_after_the_other(depth: int) -> None:
    engine = FakeEngine(block_size=SIZE, num_blocks=11, rows=4, depth=depth)
    engine.add("r", _prompt(1), sampling(28, 4))
    engine.run()
    engine.assert_exact()
    engine.assert_idle()
    assert engine.scheduler.stats.preemptions > 0


def test_aborting_every_sample_before_the_fork_ends_the_request() -> None:
    engine = FakeEngine(rows=3)
    engine.add("r", [1, 2, 3], sampling(4, 3))
    assert [[delta.index for delta in engine.abort("r", index)] for index in (1, 0, 1, 2)] == [[1], [0], [], [2]]
    assert not engine.scheduler.requests
    engine.assert_idle()


@pytest.mark.parametrize("index", [-1, 3, 99])
def test_abort_of_a_sample_that_does_not_exist_is_ignored(index: int) -> None:
    engine = FakeEngine(rows=3)
    engine.add("r", [1, 2, 3], sampling(4, 3))
    assert engine.abort("r", index) == []
    engine.run()
    engine.assert_exact()


def test_more_samples_than_rows_are_refused_and_as_many_are_served() -> None:
    engine = FakeEngine(rows=4)
    with pytest.raises(RequestError, match=r"n is 5, but at most 4 sequences run at once \(--max-num-seqs\)") as refusal:
        engine.add("five", [1, 2], sampling(4, 5))
    assert refusal.value.param == "n"
    engine.add("four", [1, 2], sampling(4, 4))
    engine.run()
    engine.assert_exact()


def test_a_prompt_of_one_token_forks_without_computing_anything() -> None:
    engine = FakeEngine(rows=4)
    engine.add("r", [9], sampling(4, 4))
    engine.run()
    engine.assert_exact()
    assert engine.runner.num_computed == 4 * 4 and engine.copies == 0
