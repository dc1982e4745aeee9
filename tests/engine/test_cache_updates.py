"""The news of a cache: what can be found and what was evicted, a limited number at a time, whoever else listens to the pool."""

import pytest

from octavo.engine import routing
from octavo.engine.process import Loop
from octavo.engine.routing import CacheUpdates
from octavo.engine.wire import Cached, Gone, Met
from octavo.inspector.engine_view import NoView
from octavo.messages import CacheChange
from octavo.policy.block_pool import BlockPool, Event
from octavo.policy.prefix_matcher import SHORT
from tests.support.fake import FakeEngine, sampling
from tests.support.watching import view_of


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def seal(pool: BlockPool, *numbers: int, group: int = 0) -> None:
    """Seals a block for each number and gives it back."""
    for number in numbers:
        block = pool.take(1)
        pool.seal(block[0], (group, digest(number)))
        pool.release(block)


def told(digests: bytes) -> set[int]:
    """Which numbers are in a change. Each has eight bytes."""
    pieces = [digests[start : start + SHORT] for start in range(0, len(digests), SHORT)]
    assert all(piece == digest(piece[0])[:SHORT] for piece in pieces)
    return {piece[0] for piece in pieces}


def changes(change: CacheChange | None) -> tuple[set[int], set[int]]:
    assert change is not None and not change.full
    return told(change.sealed), told(change.evicted)


def test_a_change_has_what_was_sealed_and_evicted_since_the_last() -> None:
    pool = BlockPool(4)
    news = CacheUpdates(pool)
    assert news.take() is None
    seal(pool, 1, 2, 3)
    assert changes(news.take()) == ({1, 2, 3}, set())
    assert news.take() is None
    seal(pool, 4)
    assert changes(news.take()) == ({4}, {1})


def test_what_happened_to_a_digest_last_is_told() -> None:
    pool = BlockPool(2)
    news = CacheUpdates(pool)
    seal(pool, 1, 2, 3)
    assert changes(news.take()) == ({3}, {1, 2})
    seal(pool, 4, 3)
    assert changes(news.take()) == ({3}, {4}), "3 was evicted and sealed again"


def test_other_cache_groups_are_not_told() -> None:
    pool = BlockPool(4)
    news = CacheUpdates(pool)
    seal(pool, 1, group=1)
    assert news.take() is None
    seal(pool, 2)
    assert changes(news.take()) == ({2}, set()) and told_by(news) == {digest(2)[:SHORT]}


def test_a_forgotten_cache_is_told() -> None:
    pool = BlockPool(4)
    news = CacheUpdates(pool)
    seal(pool, 1, 2)
    news.take()
    pool.forget()
    assert changes(news.take()) == (set(), {1, 2})


def test_a_new_frontend_is_told_in_parts_and_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_BLOCKS", 3)
    pool = BlockPool(12)
    news = CacheUpdates(pool)
    seal(pool, *range(1, 6))  # in blocks 1 to 5: the parts have blocks 0 to 2, 3 to 5, 6 to 8, 9 to 11
    news.take()
    assert news.next_part() is None and not news.is_behind
    for name in ("a", "b", "gone", "a"):
        news.add(name)
    news.drop("gone")
    parts = []
    while news.is_behind:
        parts.append(news.next_part())
    assert [part and (part[0], part[1].full, told(part[1].sealed)) for part in parts] == [
        ("b", True, {1, 2}), ("b", False, {3, 4, 5}), None, None, ("a", True, {1, 2}), ("a", False, {3, 4, 5}), None, None,
    ]  # fmt: skip


def test_a_take_tells_a_limited_number_of_changes_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_DIGESTS", 2)
    pool = BlockPool(4)
    news = CacheUpdates(pool)
    seal(pool, 1, 2, 3)
    news.take(), news.take()
    seal(pool, 4, 5, 6)
    assert news.is_behind and [changes(news.take()) for _ in range(2)] == [({4, 5}, {1, 2}), ({6}, {3})]
    assert not news.is_behind and news.take() is None


class Router:
    """Hands over a command and keeps what clients are told."""

    def __init__(self, *commands: Met | Gone) -> None:
        self.commands = list(commands)
        self.waited = False
        self.told: list[tuple[str | None, CacheChange]] = []

    def take(self, wait: bool, seconds: float | None) -> list[Met | Gone]:
        self.waited = self.waited or (wait and not self.commands)
        return [self.commands.pop(0)] if self.commands else []

    def send(self, body: object, name: str | None = None) -> None:
        if isinstance(body, Cached):
            self.told.append((name, body.change))

    def ignore(self, *args: object) -> None:
        pass

    publish = show = give = ignore


def test_an_idle_engine_tells_everything_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_BLOCKS", 4)
    monkeypatch.setattr(routing, "MOST_DIGESTS", 2)
    engine, router = FakeEngine(num_blocks=16), Router(Met("new"))
    news = CacheUpdates(engine.pool)
    engine.add("a", list(range(30)), sampling(1))
    engine.run()
    held = {key[:SHORT] for _, key in engine.pool.index}
    loop = Loop(engine.core, router, None, NoView(), 0.0, news)  # type: ignore[arg-type]
    while not router.waited:
        loop.turn()
    parts, taken = ([change for name, change in router.told if (name == "new") == new] for new in (True, False))
    assert parts[0].full and set().union(*map(sealed_in, parts)) == set().union(*map(sealed_in, taken)) == held
    assert len(held) > 4 and all(len(sealed_in(part)) <= 4 for part in parts) and all(len(sealed_in(change)) <= 2 for change in taken)
    router.waited, router.commands = False, [Met("leaves"), Gone("leaves")]
    while not router.waited:
        loop.turn()
    assert [name for name, _ in router.told].count("leaves") == 1


def test_blocks_from_before_the_news_began_are_told() -> None:
    pool = BlockPool(4)
    seal(pool, 1)
    news = CacheUpdates(pool)
    assert told_by(news) == {digest(1)[:SHORT]} and changes(news.take()) == ({1}, set())


def test_others_who_listen_to_the_pool_go_on_hearing() -> None:
    heard: list[Event] = []
    pool = BlockPool(4, lambda event, block, key: heard.append(event))
    CacheUpdates(pool)
    seal(pool, 1)
    assert heard == ["take", "seal", "release"]


@pytest.mark.parametrize("view_first", [True, False])
def test_news_and_view_do_not_disturb_each_other(view_first: bool) -> None:
    """A view attaches and detaches while the news go on, whichever of the two was made first."""
    engine = FakeEngine(num_blocks=16)
    if view_first:
        view, news = view_of(engine.core), CacheUpdates(engine.pool)
    else:
        news, view = CacheUpdates(engine.pool), view_of(engine.core)
    for number, wanted in enumerate(("none", "full", "delta", "none", "full", "none")):
        view.request("watcher", wanted)
        engine.add(str(number), [number] * 13, sampling(2))
        engine.run()
        assert news.take() is not None
        if wanted in ("full", "delta"):
            ((_, frame),) = view.frames(busy=False)
            assert frame.blocks and not frame.error
        assert told_by(news) == {key[:SHORT] for _, key in engine.pool.index}


def told_by(news: CacheUpdates) -> set[bytes]:
    """What a frontend is told that comes now."""
    news.add("new")
    part = news.next_part()
    assert part is not None and part[1].full
    return sealed_in(part[1])


def sealed_in(change: CacheChange) -> set[bytes]:
    return {change.sealed[start : start + SHORT] for start in range(0, len(change.sealed), SHORT)}
