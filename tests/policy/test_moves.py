"""Sequences that move: forked at any time, exchanging rows, truncated, given another last id. Every text stays what it should be."""

import pytest

from octavo.messages import RowFork
from octavo.policy.cache_group import FULL, CacheGroup, WindowGroup
from octavo.policy.request import Sequence
from tests.support.fake import FakeEngine, sampling

SIZE = 4
PROMPT = [(11 * i + i * i // 5) % 50 for i in range(13)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
GROUPS = pytest.mark.parametrize("groups", [(FULL,), (FULL, WindowGroup(window=5))], ids=["full", "window"])
MOMENTS = range(1, 11)  # steps after which it happens: at every place in a block


def _started(
    depth: int, groups: tuple[CacheGroup, ...], steps: int, names: str = "a", drafts: int = 0
) -> tuple[FakeEngine, list[Sequence]]:
    engine = FakeEngine(block_size=SIZE, depth=depth, groups=groups, drafts=drafts)
    seqs = [engine.add(name, PROMPT[at:], sampling(16)).sequences[0] for at, name in enumerate(names)]
    for _ in range(steps + depth - 1):
        engine.step()
    return engine, seqs


def _finish(engine: FakeEngine) -> None:
    engine.run()
    engine.assert_exact()
    engine.assert_idle()


@DEPTHS
@GROUPS
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_fork_at_any_time_goes_on_from_what_its_parent_has_said(groups: tuple[CacheGroup, ...], depth: int, drafts: int) -> None:
    for moment in MOMENTS:
        engine, (seq,) = _started(depth, groups, moment, drafts=drafts)
        if seq.num_tokens == seq.request.num_prompt or seq.row < 0:
            continue
        child, row = engine.fork(seq), seq.row
        assert child is not None
        grandchild = engine.fork(child)  # before the worker has heard of its parent
        assert grandchild is not None and len({seq.row, child.row, grandchild.row}) == 3
        engine.step()
        forks = engine.executor.plans[-1].row_forks
        assert {fork.source for fork in forks} == {row} and not any(fork.moves for fork in forks)
        _finish(engine)
        said = [engine.tokens["a", index] for index in range(3)]
        assert said[0] != said[1] != said[2], "each has its own noise"


def test_a_fork_needs_a_row_unless_its_parent_waits() -> None:
    engine = FakeEngine(block_size=SIZE, rows=1)
    (seq,) = engine.add("a", PROMPT, sampling(9)).sequences
    engine.step()
    engine.step()
    assert engine.fork(seq) is None
    engine.scheduler._preempt(seq)
    assert engine.fork(seq) is not None and len(engine.scheduler.waiting) == 2
    _finish(engine)


@DEPTHS
@GROUPS
def test_rows_exchange_places_in_one_plan(groups: tuple[CacheGroup, ...], depth: int) -> None:
    for moment in MOMENTS:
        engine, (one, other, third) = _started(depth, groups, moment, "abc")
        rows = one.row, other.row
        engine.scheduler.rows.exchange(one, other)
        assert (other.row, one.row) == rows
        engine.step()
        told = [(fork.row, fork.source, fork.moves) for fork in engine.executor.plans[-1].row_forks]
        assert told == [(rows[1], rows[0], True), (rows[0], rows[1], True)]
        engine.scheduler.rows.exchange(one, third)
        engine.scheduler.rows.exchange(third, other)  # a circle of three
        if moment % 2:
            engine.abort("a")  # its row may be given away while another's words are still to be read from it
            engine.add("d", PROMPT[::-1], sampling(5))
        engine.run()
        engine.assert_exact({"a"})
        engine.assert_idle()


def test_a_fork_that_takes_its_parents_row_at_once_has_its_own_noise() -> None:
    engine, (seq,) = _started(1, (FULL,), 3)
    child = engine.fork(seq)
    assert child is not None
    engine.scheduler.rows.exchange(seq, child)
    _finish(engine)
    assert engine.tokens["a", 0] != engine.tokens["a", 1]


def test_an_exchange_that_is_taken_back_is_not_told() -> None:
    engine, (one, other) = _started(1, (FULL,), 2, "ab")
    engine.scheduler.rows.exchange(one, other)
    engine.scheduler.rows.exchange(other, one)
    engine.step()
    assert engine.executor.plans[-1].row_forks == list[RowFork]()
    _finish(engine)


@DEPTHS
@GROUPS
@pytest.mark.parametrize("back", [0, 1, SIZE, 9])
def test_a_truncated_sequence_says_the_rest_again(back: int, groups: tuple[CacheGroup, ...], depth: int) -> None:
    for moment in MOMENTS:
        engine, (seq, _) = _started(depth, groups, moment, "ab")
        length = max(seq.num_tokens - back, seq.request.num_prompt, engine.kv.shortest(seq))
        engine.truncate(seq, length)
        assert seq.num_tokens == length > seq.num_planned and seq.in_flight == 0
        assert len(seq.digests) <= length // SIZE
        engine.step()
        assert engine.executor.plans[-1].lengths == [(seq.row, length)]
        _finish(engine)


def test_blocks_behind_a_cut_are_given_back_and_sealed_ones_stay_found() -> None:
    engine, (seq,) = _started(1, (FULL,), 12)
    held = engine.pool.num_free
    sealed = len(engine.pool.index)
    engine.truncate(seq, 14)
    assert engine.pool.num_free == held + 2 and len(engine.pool.index) == sealed == 6
    engine.step()
    assert len(engine.executor.plans[-1].copies) == 1, "the cut lies in a sealed block, which is not written again"
    _finish(engine)


def test_a_window_keeps_what_a_cut_can_still_reach() -> None:
    engine, (seq,) = _started(2, (FULL, WindowGroup(window=5)), 12)
    assert engine.kv.shortest(seq) > seq.request.num_prompt, "something was given back"
    for length in range(seq.num_computed + 1, seq.num_tokens + 1):
        assert engine.kv.shortest(seq) <= length
    with pytest.raises(AssertionError):
        engine.scheduler.moves.truncate(seq, engine.kv.shortest(seq) - 1)


@DEPTHS
@GROUPS
def test_another_last_id_goes_on_as_if_it_had_been_sampled(groups: tuple[CacheGroup, ...], depth: int) -> None:
    for moment in MOMENTS:
        engine, (seq,) = _started(depth, groups, moment)
        engine.truncate(seq, seq.num_tokens)  # drops what is in flight
        engine.replace_last(seq, (seq.token_ids[-1] + 1) % 50)
        engine.step()
        assert engine.executor.plans[-1].last_ids == [(seq.row, engine.tokens["a", 0][moment - 1])]
        child = engine.fork(seq)
        assert child is not None
        _finish(engine)
        engine.add("same beginning", PROMPT + engine.chosen["a", 0], sampling(3))
        _finish(engine)


def test_a_failed_plan_ends_requests_it_told_something_of() -> None:
    engine, (one, _) = _started(1, (FULL,), 3, "ab")
    engine.truncate(one, one.num_tokens)
    engine.faults.raise_at = -1
    engine.step()
    assert engine.reason("a") == engine.reason("b") == "error"
    engine.assert_idle()
