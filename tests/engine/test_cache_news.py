"""The news of a cache: what can be found and what was evicted, netted, whoever else listens to the pool."""

import pytest

from octavo.engine.cache_news import CacheNews
from octavo.engine.view import EngineView
from octavo.messages import CacheChange
from octavo.policy.block_pool import BlockPool, Event
from octavo.policy.digests import SHORT
from tests.support.fake import FakeEngine, sampling


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
    news = CacheNews(pool)
    assert news.take() is None
    seal(pool, 1, 2, 3)
    assert changes(news.take()) == ({1, 2, 3}, set())
    assert news.take() is None
    seal(pool, 4)
    assert changes(news.take()) == ({4}, {1})


def test_what_came_and_went_between_two_takes_is_not_told() -> None:
    pool = BlockPool(2)
    news = CacheNews(pool)
    seal(pool, 1, 2, 3)
    assert changes(news.take()) == ({3}, set())
    seal(pool, 4, 3)
    assert news.take() is None, "3 was evicted and sealed again"


def test_other_cache_groups_are_not_told() -> None:
    pool = BlockPool(4)
    news = CacheNews(pool)
    seal(pool, 1, group=1)
    assert news.take() is None
    seal(pool, 2)
    assert told(news.full().sealed) == set() and changes(news.take()) == ({2}, set())
    assert told(news.full().sealed) == {2}


def test_a_forgotten_cache_is_told() -> None:
    pool = BlockPool(4)
    news = CacheNews(pool)
    seal(pool, 1, 2)
    news.take()
    pool.forget()
    assert changes(news.take()) == (set(), {1, 2})


def test_full_is_what_all_takes_add_up_to() -> None:
    """A block that is told in full and evicted before the next take must be told then."""
    pool = BlockPool(2)
    news = CacheNews(pool)
    seal(pool, 1)
    news.take()
    seal(pool, 2)
    full = news.full()
    assert full.full and not full.evicted and told(full.sealed) == {1}
    seal(pool, 3)
    assert changes(news.take()) == ({3}, {1})


def test_blocks_from_before_the_news_began_are_told() -> None:
    pool = BlockPool(4)
    seal(pool, 1)
    news = CacheNews(pool)
    assert told(news.full().sealed) == set() and changes(news.take()) == ({1}, set())


def test_others_who_listen_to_the_pool_go_on_hearing() -> None:
    heard: list[Event] = []
    pool = BlockPool(4, lambda event, block, key: heard.append(event))
    CacheNews(pool)
    seal(pool, 1)
    assert heard == ["take", "seal", "release"]


@pytest.mark.parametrize("view_first", [True, False])
def test_news_and_view_do_not_disturb_each_other(view_first: bool) -> None:
    """A view attaches and detaches while the news go on, whichever of the two was made first."""
    engine = FakeEngine(num_blocks=16)
    if view_first:
        view, news = EngineView(engine.core), CacheNews(engine.pool)
    else:
        news, view = CacheNews(engine.pool), EngineView(engine.core)
    for number, wanted in enumerate(("none", "full", "delta", "none", "full", "none")):
        view.ask("watcher", wanted)
        engine.add(str(number), [number] * 13, sampling(2))
        engine.run()
        assert news.take() is not None
        if wanted in ("full", "delta"):
            ((_, frame),) = view.frames(busy=False)
            assert frame.blocks and not frame.error
        assert told_by(news) == {key[:SHORT] for _, key in engine.pool.index}


def told_by(news: CacheNews) -> set[bytes]:
    sealed = news.full().sealed
    return {sealed[start : start + SHORT] for start in range(0, len(sealed), SHORT)}
