"""What is found again and why not: hit reasons, salts, eviction, bursts, edges of a block."""

import pytest

from octavo.messages import AddRequest, LifeRecord, PinOrder
from octavo.policy.prefix_matcher import SHORT
from tests.support.fake import FakeEngine, sampling

LONG = list(range(20))


def _served(engine: FakeEngine, name: str, prompt: list[int], salt: str = "", count: int = 1) -> LifeRecord:
    request = engine.add(name, prompt, sampling(count), salt=salt)
    engine.run()
    engine.assert_exact()
    return request.life


# promise: why-prefix-missed, another-tenants-salt
def test_every_hit_says_why_it_ends_where_it_ends() -> None:
    engine = FakeEngine(block_size=4, num_blocks=12)
    found = {
        "nothing like it before": _served(engine, "cold", LONG),
        "all full blocks short of the last token": _served(engine, "end", LONG),
        "no full block short of the last token": _served(engine, "short", LONG[:4]),
        "another third block": _served(engine, "differs", LONG[:8] + [40, 41, 42, 43, 44]),
        "the same under another salt": _served(engine, "salt", LONG, salt="tenant"),
    }
    _served(engine, "flood", [49] * 40)  # takes every block of the pool but one
    found["thrown out meanwhile"] = _served(engine, "evicted", LONG)
    engine.pool.forget()
    found["after a reset"] = _served(engine, "reset", LONG)
    assert {case: (life.hit_reason, life.cached_tokens) for case, life in found.items()} == {
        "nothing like it before": ("cold", 0),
        "all full blocks short of the last token": ("end", 16),
        "no full block short of the last token": ("short", 0),
        "another third block": ("differs", 8),
        "the same under another salt": ("cold", 0),
        "thrown out meanwhile": ("evicted", 0),
        "after a reset": ("cold", 0),
    }
    assert _served(FakeEngine(caching=False), "off", LONG).hit_reason == "off"


def test_generated_blocks_are_found_too() -> None:
    engine = FakeEngine(block_size=4)
    _served(engine, "turn 1", LONG[:6], count=11)
    answer = engine.tokens["turn 1", 0]
    life = _served(engine, "turn 2", LONG[:6] + answer + [1, 2, 3, 4])
    assert (life.cached_tokens, life.hit_reason) == (16, "differs")  # 17 tokens stand; the last one was never computed


@pytest.mark.parametrize("depth", [1, 2])
def test_statistics_count_tokens_looked_up_found_computed_and_generated(depth: int) -> None:
    engine = FakeEngine(block_size=4, depth=depth, end_ids=tuple(range(25)), budget=9)
    _served(engine, "first", LONG, count=5)
    _served(engine, "second", LONG, count=5)
    engine.add("three", LONG[::-1], sampling(5, n=3))
    engine.run()
    stats = engine.scheduler.snapshot()
    assert (stats.prefix_queries, stats.prefix_hits) == (60, 16)
    assert stats.prompt_tokens == 20 + 4 + 20
    assert stats.generation_tokens == sum(map(len, engine.tokens.values()))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_burst_computes_its_common_prefix_once(depth: int) -> None:
    engine = FakeEngine(block_size=16, num_blocks=256, rows=32, budget=256, depth=depth, check=False)
    prefix = [(i * i + 3) % 50 for i in range(512)]
    for number in range(32):
        engine.add(str(number), prefix + [number, number + 1, 7, 8, 9], sampling(4))
    engine.run()
    engine.assert_exact()
    engine.assert_idle()
    assert engine.runner.num_computed == 512 + 32 * (5 + 3)
    assert sum(request.life.cached_tokens for _, request in engine.asked.values()) == 31 * 512


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("end", ["abort", "preempt", "nan", "raise"])
def test_whoever_waits_for_a_prefix_goes_on_when_its_owner_does_not(end: str, depth: int) -> None:
    engine = FakeEngine(block_size=4, rows=4, budget=8, depth=depth)
    engine.add("owner", LONG + [30], sampling(3))
    engine.add("waiter", LONG + [31], sampling(3))
    engine.step()
    assert engine.kv.pending and [seq.request.request_id for seq in engine.scheduler.waiting] == ["waiter"]
    if end == "abort":
        engine.abort("owner")
    elif end == "preempt":
        engine.preempt_last()
    elif end == "nan":
        engine.faults.poison = {0}
    else:
        engine.faults.raise_at = 0
    engine.run()
    engine.assert_idle()
    engine.assert_exact({"owner"})
    assert engine.reason("waiter") == "length"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_lengths_around_a_block_edge_are_exact_with_and_without_hits(size: int, depth: int) -> None:
    lengths = sorted({1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1} - {0})
    engine = FakeEngine(block_size=size, num_blocks=200, depth=depth, budget=8)
    prompt = [(5 * i + 2) % 50 for i in range(2 * size + 1)]
    for number, length in enumerate(lengths * 2):
        for count in sorted({1, size, size + 1}):
            life = _served(engine, f"{number}/{length}/{count}", prompt[:length], count=count)
            if number >= len(lengths):
                assert life.cached_tokens == (length - 1) // size * size


def test_eviction_takes_tails_before_heads_so_that_prefixes_live_longest() -> None:
    engine = FakeEngine(block_size=4, num_blocks=9)
    _served(engine, "first", LONG)  # 5 blocks sealed, the last of them never found (it holds the last token)
    _served(engine, "other", [40 + i % 9 for i in range(20)])  # 5 of 8 blocks: 3 unsealed ones and two tails
    assert _served(engine, "again", LONG).cached_tokens == 12


def test_admission_counts_hit_blocks_that_nobody_holds() -> None:
    """Free they look, but the hit takes them out of the free list: without counting them the allocation would not fit."""
    engine = FakeEngine(block_size=4, num_blocks=11, rows=2)
    _served(engine, "warm", LONG[:17])  # 4 blocks findable, at ref 0
    engine.add("runs", [45] * 10, sampling(6))
    engine.step()
    assert engine.pool.num_free == 7
    engine.add("hit", LONG[:17] + [30] * 10, sampling(2))  # 7 blocks: 4 found, 3 fresh, and 1 must stay free
    engine.step()
    assert [seq.request.request_id for seq in engine.scheduler.waiting] == ["hit"]
    engine.run()
    engine.assert_exact()
    assert engine.asked["hit"][1].life.cached_tokens == 16
    engine.assert_idle()


def test_a_reset_while_requests_run_changes_no_text() -> None:
    engine = FakeEngine(block_size=2, num_blocks=40, depth=2, rows=3)
    for number in range(6):
        engine.add(str(number), LONG[: 5 + number], sampling(9))
    while engine.core.has_work:
        engine.pool.forget()
        engine.step()
    engine.assert_exact()
    engine.assert_idle()


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_large_batch_takes_turns_at_sealing_and_nobody_falls_far_behind(block_size: int) -> None:
    engine = FakeEngine(block_size=block_size, num_blocks=128 * 80, rows=128, budget=128 * 40, max_len=64, check=False)
    for number in range(128):
        engine.add(str(number), [number % 50, number // 50] + [7] * 30, sampling(24))
    pool, sealed = engine.scheduler.kv.pool, []
    for _ in range(20):
        before = pool.counts.sealed
        engine.step()
        sealed.append(pool.counts.sealed - before)
        lag = max(seq.num_computed // block_size - seq.num_sealed for seq in engine.scheduler.running)
        assert lag <= max(1, 4 // block_size) or engine.scheduler.step < 5, "some sequence never has its turn"
    if block_size == 16:
        crossing = sealed[16:]  # all 128 cross position 48 together
        assert max(crossing) < 64, "one step paid for all"
    engine.run()
    engine.assert_exact()


def test_what_a_digest_covers_besides_tokens_separates_hits_pins_and_routing() -> None:
    engine, prompt = FakeEngine(block_size=4, max_len=60), list(range(13))
    digests = engine.kv.digests

    def cached(name: str, extras: dict[int, bytes], pin: PinOrder | None = None) -> int:
        message = AddRequest(name, list(prompt), sampling(1), extras=extras, pin=pin)
        engine.core.add(message)
        request, ended = engine.scheduler.requests[name], engine.scheduler.on_end
        found: list[bytes] = []
        engine.scheduler.on_end = lambda seq, reason: found.extend(seq.digests)
        while name in engine.scheduler.requests:
            engine.core.step()
        engine.scheduler.on_end = ended
        assert pin is not None or digests.of_prompt(message, 4) == [digest[:SHORT] for digest in found[:3]]
        return request.life.cached_tokens

    assert cached("plain", {}) == 0 and cached("again", {}) == 12
    assert cached("image", {1: b"a cat"}) == 4 and cached("other", {1: b"a dog"}) == 4 and cached("same", {1: b"a cat"}) == 12
    cached("pin", {1: b"a cat"}, PinOrder("p"))
    assert engine.scheduler.pins.num_blocks == 3
    engine.pool.forget()
    assert cached("held", {1: b"a cat"}) == 12 and cached("not held", {}) < 12
