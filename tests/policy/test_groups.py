"""Two cache groups over one pool: a full one keeps every position, one with a window gives back what nothing can read any more."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from octavo.errors import RequestError
from octavo.policy.block_pool import NULL_BLOCK
from octavo.policy.cache_group import FULL, CacheGroup, WindowGroup
from octavo.policy.request import Sequence
from tests.support.fake import FakeEngine, PairsGroup, sampling

SIZE, WINDOW = 4, 6
BOTH = (FULL, WindowGroup(window=WINDOW))
PROMPT = [(7 * i + i * i // 3) % 50 for i in range(29)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def _held(seq: Sequence) -> list[int]:
    """How many blocks it holds in each group."""
    return [sum(block != NULL_BLOCK for block in table) for table in seq.tables]


@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
def test_a_window_gives_back_what_lies_behind_it_and_the_worker_hears_of_it(caching: bool, depth: int) -> None:
    engine = FakeEngine(block_size=SIZE, groups=BOTH, budget=8, depth=depth, caching=caching)
    (seq,) = engine.add("r", PROMPT, sampling(30)).sequences
    most = 0
    while engine.core.has_work:
        engine.step()
        if seq.tables[0]:
            most = max(most, _held(seq)[1])
    engine.assert_exact()
    engine.assert_idle()
    assert most <= (2 * 8 + WINDOW - 2) // SIZE + 2
    told = [(group, index) for plan in engine.executor.plans for _, group, index, block in plan.new_blocks if block == NULL_BLOCK]
    assert sorted(told) == [(1, index) for index in range(len(told))] and len(told) >= (29 + 30 - WINDOW - 8) // SIZE


@DEPTHS
def test_a_request_longer_than_the_pool_has_room_for_twice_is_served_because_windows_give_back(depth: int) -> None:
    engine = FakeEngine(block_size=SIZE, groups=BOTH, num_blocks=24, rows=2, budget=4, depth=depth)
    assert engine.max_len > 12 * SIZE, "both groups together would not fit"
    engine.add("r", PROMPT, sampling(engine.max_len - len(PROMPT)))
    engine.add("too", PROMPT[::-1], sampling(engine.max_len - len(PROMPT)))
    with pytest.raises(RequestError, match=rf"may grow to \d+ blocks of 4 tokens, but the KV cache has {(engine.max_len - 1) // SIZE}"):
        engine.scheduler.limits = type(engine.scheduler.limits)(2, 4, 999, 50, 24, SIZE, cache_tokens=engine.kv.most_tokens())
        engine.add("more", PROMPT, sampling(engine.max_len - len(PROMPT) + 1))
    engine.run()
    engine.assert_exact()
    engine.assert_idle()


def test_a_hit_is_the_longest_prefix_that_every_group_can_start_from() -> None:
    engine = FakeEngine(block_size=SIZE, groups=BOTH, num_blocks=64)
    engine.add("warm", PROMPT, sampling(1))
    engine.run()

    def forget(group: int, *indices: int) -> None:
        engine.kv.prefixes.match(seq)  # makes its digests
        for index in indices:
            block = engine.pool.index[group, seq.digests[index]]
            engine.pool._evict(block)

    (seq,) = engine.add("r", PROMPT, sampling(6)).sequences
    hit = engine.kv.prefixes.match(seq)
    assert (hit.num_tokens, hit.reason) == (28, "end")
    assert [block == NULL_BLOCK for block in hit.tables[1]] == [True] * 5 + [False] * 2, "a window needs its last blocks only"
    forget(1, 5)
    hit = engine.kv.prefixes.match(seq)
    assert (hit.num_tokens, hit.reason, hit.missed) == (20, "evicted", (1, seq.digests[5])), "the missing block of the window ends it"
    forget(0, 4)
    hit = engine.kv.prefixes.match(seq)
    assert (hit.num_tokens, hit.missed) == (16, (0, seq.digests[4]))
    forget(1, 2)
    assert engine.kv.prefixes.match(seq).num_tokens == 8
    engine.run()
    engine.assert_exact()
    lives = [engine.asked[name][1].life for name in ("warm", "r")]
    assert [(life.hit_reason, life.hit_group, life.cached_tokens) for life in lives] == [("cold", 0, 0), ("evicted", 1, 8)]


def test_one_who_waits_for_a_block_of_a_window_goes_on_when_it_is_sealed() -> None:
    engine = FakeEngine(block_size=SIZE, groups=BOTH, num_blocks=64, budget=12)
    engine.add("first", PROMPT, sampling(2))
    engine.step()
    engine.add("second", [*PROMPT, 1], sampling(2))
    engine.step()
    assert [seq.request.request_id for seq in engine.scheduler.waiting] == ["second"]
    assert engine.scheduler.waiting[0].waits_for is not None
    engine.run()
    engine.assert_exact()
    assert engine.asked["second"][1].life.cached_tokens == 28


@DEPTHS
@pytest.mark.parametrize("links", [(1, 2), (2, 1)])
def test_groups_whose_blocks_have_more_tokens_share_the_pool(links: tuple[int, int], depth: int) -> None:
    groups = (CacheGroup(links=links[0]), WindowGroup(window=WINDOW, links=links[1]))
    engine = FakeEngine(block_size=SIZE, groups=groups, num_blocks=64, depth=depth, preempt_every=5)
    for number in range(4):
        engine.add(str(number), PROMPT[: 20 + number], sampling(20, n=1 + number % 2))
    engine.run()
    engine.add("again", PROMPT, sampling(4))
    engine.run()
    engine.assert_exact()
    engine.assert_idle()
    assert engine.asked["again"][1].life.cached_tokens % (2 * SIZE) == 0 < engine.asked["again"][1].life.cached_tokens


@DEPTHS
def test_a_kind_with_its_own_length_is_read_up_to_there(depth: int) -> None:
    engine = FakeEngine(block_size=SIZE, groups=(*BOTH, PairsGroup()), budget=8, depth=depth)
    engine.add("r", PROMPT, sampling(10))
    engine.add("other", PROMPT[3:], sampling(10))
    engine.run()
    engine.assert_exact()
    for plan in engine.executor.plans:
        ends = [start + count for start, count in zip(plan.start, plan.num_query)]
        assert plan.group_lengths == {2: [end // 2 * 2 for end in ends]}


def test_a_request_as_large_as_the_pool_comes_in_with_any_hit() -> None:
    """A window gives its hit back before it holds its last blocks: both together need not fit."""
    groups = (FULL, WindowGroup(window=WINDOW, links=2))
    for cached in range(0, 40, SIZE):
        engine = FakeEngine(block_size=SIZE, groups=groups, num_blocks=15, rows=4, budget=9)
        engine.add("warm", [*PROMPT, *PROMPT][: cached + 1], sampling(1))
        engine.run()
        engine.add("r", [*PROMPT, *PROMPT][: engine.max_len - 1], sampling(1))
        engine.run(most_steps=200)
        engine.assert_exact()


@dataclass(frozen=True, slots=True)
class Chunks(CacheGroup):
    """A query sees the positions of its own chunk of 8, as in some layers of Llama 4."""

    frees: ClassVar[bool] = True

    def first_read(self, length: int) -> int:
        return length // 8 * 8

    def most_held(self, span: int, step_tokens: int) -> int:
        return (2 * step_tokens + 7) // span + 2


@DEPTHS
def test_another_kind_of_cache_is_one_class(depth: int) -> None:
    engine = FakeEngine(block_size=SIZE, groups=(FULL, Chunks()), num_blocks=40, rows=4, budget=9, depth=depth, preempt_every=7)
    for number in range(6):
        engine.add(str(number), PROMPT[: 12 + number], sampling(30, n=1 + number % 2))
    engine.run()
    engine.assert_exact()
    engine.assert_idle()
    hit = engine.kv.prefixes.match(engine.add("again", PROMPT[:17], sampling(2)).sequences[0])
    assert hit is not None and hit.num_tokens == 16
    assert [block == NULL_BLOCK for block in hit.tables[1]] == [True] * 4, "the query at position 16 begins a chunk"
    engine.run()
    engine.assert_exact()
