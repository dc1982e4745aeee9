"""What admission costs: requests that wait are matched again only when they may fit, and a burst is hashed over several steps."""

from typing import Any

import pytest

from octavo.policy.prefix_matcher import Digests
from tests.support.fake import FakeEngine, sampling

PREFIX = [(i * i + 3) % 50 for i in range(40)]


def _counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, size: Any) -> list[int]:
    """Notes `size(arguments)` of every call of a method."""
    calls: list[int] = []
    method = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        calls.append(size(arguments))
        return method(*arguments)

    monkeypatch.setattr(owner, name, counted)
    return calls


def _hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return _counted(monkeypatch, Digests, "extend", lambda given: given[5] - len(given[1]))


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_do_not_fit_are_matched_again_only_when_they_may_fit(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(block_size=4, num_blocks=33, rows=8, depth=depth, check=False)
    engine.add("runs", PREFIX, sampling(80))
    for _ in range(4):
        engine.step()
    for number in range(5):
        engine.add(str(number), [*PREFIX, number, *PREFIX, *PREFIX], sampling(2))  # 21 blocks besides the prefix, and ever fewer are free
    while engine.pool.num_free > 8:
        engine.step()
    matched = _counted(monkeypatch, type(engine.kv.prefixes), "match", lambda given: given[1].seq_id)
    taken = engine.pool.counts.taken
    while engine.pool.counts.taken < taken + 4:
        engine.step()
    assert matched == [], "blocks were taken and sealed, but none became free"
    engine.abort("runs")
    engine.run()
    assert set(matched) == set(range(1, 6)) and len(matched) < 5 * 5
    engine.assert_exact({"runs"})
    engine.assert_idle()
    assert all(request.life.cached_tokens == 40 for name, (_, request) in engine.asked.items() if name != "runs")


def test_a_step_hashes_a_bounded_part_of_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(block_size=4, num_blocks=200, rows=8, budget=64, links=4)
    hashed = _hashed(monkeypatch)
    for number in range(8):
        engine.add(str(number), [number, *PREFIX], sampling(2))
    while engine.scheduler.waiting:
        engine.step()
        assert sum(hashed) <= 4 + 8, "four links of those that wait, besides one of each that runs"
        hashed.clear()
    engine.run()
    engine.assert_exact()
    engine.assert_idle()


@pytest.mark.parametrize("computed", [False, True])
def test_prompts_that_begin_alike_are_hashed_once(computed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether one of them is computing the beginning or has computed it."""
    engine = FakeEngine(block_size=4, num_blocks=400, rows=16, budget=256, check=False)
    engine.add("first", PREFIX, sampling(40))
    if computed:
        engine.step()
    hashed = _hashed(monkeypatch)
    for number in range(12):
        engine.add(str(number), [*PREFIX, number, 1, 2, 3], sampling(2))
    engine.step()
    engine.step()
    assert not engine.scheduler.waiting
    assert sum(hashed) <= 10 + 12 * 3, "the first link of each, and what differs"
    engine.run()
    engine.assert_exact()


def test_an_empty_pool_is_not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(block_size=4, num_blocks=12, rows=4, check=False)
    engine.add("runs", PREFIX, sampling(4))
    engine.step()
    hashed = _hashed(monkeypatch)
    for number in range(3):
        engine.add(str(number), [number] * 5, sampling(2))
    engine.step()
    assert engine.pool.num_free <= 1 and len(engine.scheduler.waiting) == 3
    assert sum(hashed) == 0, "not a block is free beyond the one that whoever runs may need"
    engine.run()
    engine.assert_exact()
