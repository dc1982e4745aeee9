"""The pool against a plain model (a ref per block, one list for the order of the free ones, one dict for the cache)."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from octavo.policy.block_pool import EVICTED_RING, BlockKey, BlockPool, Event
from tests.policy.machine_settings import SOAK, machine_settings


def _key(number: int) -> BlockKey:
    """Two groups, with digests in common."""
    return number % 2, (number // 2).to_bytes(32, "little")


def _some(blocks: list[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(blocks), min_size=1, unique=True)


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.events: list[tuple[Event, int, BlockKey | None]] = []
        self.pool = BlockPool(num_blocks, lambda *event: self.events.append(event))
        self.ref = dict.fromkeys(range(1, num_blocks), 0)
        self.order = list(range(1, num_blocks))  # the free ones, first to be taken first
        self.cached: dict[BlockKey, int] = {}

    def _held(self) -> list[int]:
        return [block for block, count in self.ref.items() if count]

    def _unsealed(self) -> list[int]:
        return [block for block in self._held() if block not in self.cached.values()]

    @precondition(lambda self: bool(self.order))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.order)))
        wanted, self.order = self.order[:count], self.order[count:]
        assert self.pool.take(count) == wanted
        self.ref.update(dict.fromkeys(wanted, 1))
        self.cached = {key: block for key, block in self.cached.items() if block not in wanted}

    @precondition(lambda self: bool(self._held() or self.cached))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Held blocks and cached ones can get another holder."""
        blocks = data.draw(_some(sorted({*self._held(), *self.cached.values()})))
        self.pool.share(blocks)
        for block in blocks:
            self.ref[block] += 1
        self.order = [block for block in self.order if block not in blocks]

    @precondition(lambda self: bool(self._held()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(_some(self._held()))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.ref[block] -= 1
            if self.ref[block] == 0:
                self.order.insert(len(self.order) if block in self.cached.values() else 0, block)

    @precondition(lambda self: bool(self._unsealed()))
    @rule(data=st.data(), first=st.integers(0, 15))
    def seal(self, data: st.DataObject, first: int) -> None:
        for number, block in enumerate(data.draw(_some(self._unsealed())), first):
            self.pool.seal(block, _key(number % 16))
            self.cached.setdefault(_key(number % 16), block)

    @rule(sure=st.sampled_from([False] * 7 + [True]))
    def forget(self, sure: bool) -> None:
        if sure:
            self.pool.forget()
            self.cached = {}
            assert not self.pool.evicted

    @invariant()
    def equals_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.ref[1:] == list(self.ref.values())
        assert list(self.pool.free) == self.order and self.pool.num_free == len(self.order)
        assert all(self.pool.lookup(_key(number)) == self.cached.get(_key(number)) for number in range(16))
        for block, count in self.ref.items():
            assert self.pool.writable(block) == (count == 1 and block not in self.cached.values())

    def teardown(self) -> None:
        """Whoever only heard the events knows as much as the pool; the counters count them."""
        if not hasattr(self, "pool"):
            return
        names = [event for event, _, _ in self.events]
        counts = self.pool.counts
        assert [names.count("take"), names.count("share"), names.count("seal"), names.count("evict")] == [
            counts.taken, counts.shared, counts.sealed, counts.evicted,
        ]  # fmt: skip
        change = {"take": 1, "share": 1, "release": -1, "seal": 0, "evict": 0}
        heard = {block: sum(change[event] for event, at, _ in self.events if at == block) for block in self.ref}
        assert heard == self.ref


def test_pool_equals_its_model_under_any_calls() -> None:
    run_state_machine_as_test(PoolMachine, settings=machine_settings(100, 100))


@pytest.mark.soak
def test_pool_equals_its_model_under_any_calls_for_long() -> None:
    run_state_machine_as_test(PoolMachine, settings=machine_settings(500, 100, SOAK))


def test_unsealed_blocks_are_taken_first_then_tails_of_the_least_recently_released_prefix() -> None:
    pool = BlockPool(8)
    first, second, scratch = pool.take(3), pool.take(3), pool.take(1)
    for block in first + second:
        pool.seal(block, _key(block))
    pool.release(second)
    pool.release(first)
    pool.release(scratch)
    assert pool.take(7) == scratch + second[::-1] + first[::-1]


def test_a_hit_makes_blocks_recent_again() -> None:
    pool = BlockPool(4)
    a, b, c = pool.take(3)
    for block in (a, b, c):
        pool.seal(block, _key(block))
        pool.release([block])
    pool.share([a])
    pool.release([a])
    assert pool.take(3) == [b, c, a]


def test_equal_content_stays_a_private_duplicate_and_is_never_remapped() -> None:
    pool = BlockPool(4)
    a, b = pool.take(2)
    pool.seal(a, _key(1))
    pool.seal(b, _key(1))
    assert pool.lookup(_key(1)) == a and pool.writable(b)


def test_only_the_latest_evictions_are_remembered() -> None:
    pool = BlockPool(2)
    for number in range(EVICTED_RING + 2):
        blocks = pool.take(1)
        pool.seal(blocks[0], _key(number))
        pool.release(blocks)
    pool.take(1)
    assert len(pool.evicted) == EVICTED_RING
    assert _key(1) not in pool.evicted and _key(2) in pool.evicted


def test_a_pool_without_enough_blocks_or_with_too_many_releases_is_a_bug_that_shows() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.take(3)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release([1])
