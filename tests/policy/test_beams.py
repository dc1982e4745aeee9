"""Beam search over FakeKV: a group is planned, preempted and resumed whole, shares its blocks, and gives the answers it should."""

from random import Random

import pytest

from octavo.errors import RequestError
from octavo.messages import Beams, StepPlan
from octavo.policy.cache_group import FULL, CacheGroup
from tests.support.fake import GROUPS, FakeEngine, sampling

SIZE = 4
PROMPT = [(11 * i + i * i // 5) % 50 for i in range(13)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
ENDS = tuple(range(3, 50, 5))


def _answered(engine: FakeEngine, name: str = "a") -> list[list[int]]:
    engine.run()
    engine.assert_exact()
    engine.assert_idle()
    return [tokens for (at, _), tokens in engine.tokens.items() if at == name]


@DEPTHS
@pytest.mark.parametrize("groups", GROUPS[1:])
@pytest.mark.parametrize("early", [False, True, "never"])
def test_beams_are_those_of_a_search_without_blocks(groups: tuple[CacheGroup, ...], depth: int, early: bool) -> None:
    for width, penalty in ((1, 1.0), (2, -0.5), (3, 0.0), (4, 0.5), (5, 2.0), (2, 1.5), (3, 1.0)):
        engine = FakeEngine(block_size=SIZE, num_blocks=200, depth=depth, groups=groups, end_ids=ENDS)
        engine.add("a", PROMPT, sampling(14, n=width), beams=Beams(width, penalty, early))
        answers = _answered(engine)
        assert len({tuple(answer) for answer in answers}) == width, "all answers differ"


def test_the_best_n_of_a_wider_search_are_given_out() -> None:
    engine = FakeEngine(block_size=SIZE)
    for name, n in (("all", 4), ("two", 2)):
        engine.add(name, PROMPT, sampling(9, n=n), beams=Beams(4))
    answers = _answered(engine, "all")
    assert [engine.tokens["two", index] for index in range(2)] == answers[:2]


# promise: beam-search-forks
@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("moment", range(1, 12, 2))
def test_a_group_is_preempted_whole_and_comes_back_whole(moment: int, caching: bool, depth: int) -> None:
    engine = FakeEngine(block_size=SIZE, depth=depth, caching=caching, end_ids=ENDS)
    request = engine.add("a", PROMPT, sampling(14, n=3), beams=Beams(3, 1.0, "never"))
    for _ in range(moment + 2 * depth):
        engine.step()
    engine.preempt_last()
    engine.step()
    assert len(engine.scheduler.waiting) == 1 or not engine.scheduler.requests
    _answered(engine)
    assert request.life.preemptions == 1


def test_beams_that_come_back_compute_what_they_share_once() -> None:
    engine = FakeEngine(block_size=SIZE, caching=False, num_blocks=200)
    prompt = (PROMPT * 4)[:40]
    engine.add("a", prompt, sampling(30, n=4), beams=Beams(4))
    for _ in range(9):
        engine.step()
    before = engine.runner.num_computed
    engine.preempt_last()
    engine.step()
    assert not engine.scheduler.running or len(engine.scheduler.waiting) == 1
    while len(engine.scheduler.running) < 4:
        engine.step()
    engine.step()
    assert 40 < engine.runner.num_computed - before <= 40 + 4 * (SIZE + 9), "the prompt is computed once for all"
    _answered(engine)


# promise: beam-search-forks
def test_four_beams_hold_few_more_blocks_than_one_sequence() -> None:
    engine = FakeEngine(block_size=16, num_blocks=400, budget=2048)
    engine.add("a", [token % 50 for token in range(800)], sampling(200, n=4), beams=Beams(4))
    most = 0
    while engine.core.has_work:
        engine.step()
        most = max(most, engine.pool.num_blocks - 1 - engine.pool.num_free)
    one = -(-1000 // 16)
    assert one < most <= 1.65 * one
    _answered(engine)


class _Schedule:
    """A random life of a few searches and samples, in a pool that hardly has room for one of the searches."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        size, self.width, self.tokens = rng.choice([1, 2, 4, 8]), rng.randint(2, 4), rng.randint(4, 16)
        self.groups = rng.choice(GROUPS)
        self.stages = rng.choice([1, 1, 1, 2]) if self.groups == (FULL,) else 1
        spans = [group.links * size for group in self.groups]
        own, shared = sum(self.tokens // span + 1 for span in spans), sum(30 // span + 1 for span in spans)
        self.engine = FakeEngine(
            block_size=size, num_blocks=shared + self.width * own + rng.randint(0, 3), rows=rng.randint(self.width, 7), budget=8,
            depth=rng.choice([1, 2]) if self.stages == 1 else 1, caching=rng.random() < 0.7, end_ids=rng.choice([(), ENDS]),
            groups=self.groups, preempt_every=rng.choice([0, 0, 3, 7]), stages=self.stages, max_len=64,
        )  # fmt: skip
        self.searches = 0
        self.ended: set[str] = set()

    def add(self) -> None:
        rng, name = self.rng, f"r{len(self.engine.asked)}"
        prompt = [(seed * 7 + 3) % 50 for seed in range(rng.randint(1, 20))] + [rng.randrange(50) for _ in range(rng.randint(0, 9))]
        beams: Beams | None = None
        if rng.random() < 0.3:
            params = sampling(rng.randint(1, 30), n=rng.randint(1, 2))
        else:
            beams = Beams(rng.randint(1, self.width), rng.choice([0.5, 1.0, 2.0]), rng.choice([False, True, "never"]))
            params = sampling(rng.randint(1, self.tokens), n=rng.randint(1, beams.width))
        try:
            self.engine.add(name, prompt, params, beams=beams)
            self.searches += beams is not None
        except RequestError as refused:  # it may grow larger than the pool
            assert refused.param == "max_tokens"

    def run(self) -> int:
        """Returns how many searches were answered, undisturbed."""
        engine, rng = self.engine, self.rng
        for _ in range(40):
            what = rng.random()
            if what < 0.2 and len(engine.asked) < 6:
                self.add()
            elif what < 0.3:
                engine.preempt_last()
            elif what < 0.33 and engine.scheduler.requests:
                name = rng.choice(list(engine.scheduler.requests))
                self.ended.add(name)
                engine.abort(name)
            elif what < 0.36 and engine.scheduler.requests:
                engine.begin_again(rng.choice(list(engine.scheduler.requests)))
            elif what < 0.4:
                engine.pool.forget()
            engine.step()
        engine.scheduler.preempt_every = 0
        engine.run()
        engine.assert_exact(self.ended)
        engine.assert_idle()
        return self.searches


@pytest.mark.parametrize("lives", [75, pytest.param(6000, marks=pytest.mark.soak)])
def test_searches_in_small_pools_come_to_their_answers_and_leave_nothing(lives: int) -> None:
    answered = preempted = 0
    for seed in range(lives):
        schedule = _Schedule(seed)
        answered += schedule.run()
        preempted += schedule.engine.scheduler.stats.preemptions
    print(f"{lives} lives, {answered} searches, {preempted} preemptions")
    assert answered > 2 * lives and preempted > lives


@pytest.mark.parametrize("free", range(6))
def test_room_for_a_group_is_counted_as_it_is_taken(free: int) -> None:
    """Four beams have parted in a block that is filled in part: three copy it, the last one writes in place."""
    engine = FakeEngine(block_size=SIZE)
    request = engine.add("a", PROMPT, sampling(9, n=4), beams=Beams(4))
    engine.step()
    beams = request.sequences
    assert len(beams) == 4 and len(PROMPT) % SIZE
    taken = engine.pool.take(engine.pool.num_free - free)
    fits = engine.kv.have_room(beams)
    assert fits == (free >= 3) == all(engine.kv.allocate(beam, 1, StepPlan(99)) for beam in beams)
    engine.pool.release(taken)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("groups", GROUPS[2:])
def test_a_search_whose_windows_are_freed_while_it_is_computed_needs_no_room_for_all_of_its_blocks(
    groups: tuple[CacheGroup, ...], width: int
) -> None:
    """It was preempted in every step of a long prompt, for ever, because its whole prompt did not fit at once."""
    accepted = 0
    for length in range(4, 70):
        engine = FakeEngine(block_size=2, num_blocks=30, rows=2, budget=2, most_len=length + 4, groups=groups)
        try:
            engine.add("a", [token % 50 for token in range(length)], sampling(3, n=width), beams=Beams(width))
        except RequestError:
            continue
        accepted += len(_answered(engine)) == width
    assert accepted


def test_what_can_never_be_searched_is_refused() -> None:
    engine = FakeEngine(block_size=SIZE, num_blocks=16, rows=4)
    for beams, n, count, param in (
        (Beams(2), 3, 4, "n"), (Beams(5), 1, 4, "beam_width"), (Beams(4), 4, 40, "max_tokens"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as refused:
            engine.add("a", PROMPT, sampling(count, n=n), beams=beams)
        assert refused.value.param == param
    engine.assert_idle()


def test_an_abort_or_a_fault_ends_all_beams() -> None:
    for moment in range(1, 6):
        engine = FakeEngine(block_size=SIZE)
        engine.add("a", PROMPT, sampling(9, n=2), beams=Beams(3))
        engine.add("b", PROMPT, sampling(9, n=2), beams=Beams(3))
        for _ in range(moment):
            engine.step()
        assert [delta.index for delta in engine.abort("a", 1)] == [0, 1]
        engine.faults.poison = {0}
        engine.step()
        assert [engine.reason(name, index) for name in "ab" for index in (0, 1)] == ["abort", "abort", "error", "error"]
        engine.assert_idle()


def test_forks_and_ends_of_beams_are_told_in_plans() -> None:
    engine = FakeEngine(block_size=SIZE, groups=(FULL,))
    ended: list[str] = []
    engine.scheduler.on_end = lambda seq, reason: ended.append(reason)
    engine.add("a", PROMPT, sampling(12, n=4), beams=Beams(4))
    _answered(engine)
    forks = [fork for plan in engine.executor.plans for fork in plan.row_forks]
    assert len(forks) == 3 + ended.count("lost") > 3 and not any(fork.moves for fork in forks)
    assert ended[-4:] == ["length"] * 4
