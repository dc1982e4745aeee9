"""Pinned prefixes on FakeKV: their blocks stay, whoever comes and goes, and nothing of them stays behind."""

import pytest

from octavo.errors import RequestError
from octavo.messages import Beams, PinOrder
from octavo.policy.cache_group import CacheGroup
from octavo.policy.pins import COMPUTE
from octavo.sampling_params import SamplingParams
from tests.support.fake import GROUPS, FakeEngine, sampling

PROMPT = [3 * i % 50 for i in range(27)]
OTHERS = [[(7 * i + 11 * j) % 50 for i in range(20)] for j in range(12)]


def flood(engine: FakeEngine) -> None:
    """Other requests fill the whole pool several times."""
    for number, prompt in enumerate(OTHERS):
        engine.add(f"other{len(engine.asked)}-{number}", prompt, sampling(4))
    engine.run()


def found(engine: FakeEngine, name: str, prompt: list[int], salt: str = "") -> tuple[int, int]:
    """How many tokens a request found in the cache, and in pinned blocks."""
    life = engine.add(name, prompt, sampling(2), salt=salt).life
    engine.run()
    return life.cached_tokens, life.pinned_tokens


# promise: pinned-prefix
@pytest.mark.parametrize("groups", GROUPS[1:], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_pinned_prefix_is_found_whole_after_any_number_of_other_prompts(groups: tuple[CacheGroup, ...], depth: int) -> None:
    blocks = 80 if len(groups) > 2 else 48
    engine = FakeEngine(block_size=2, num_blocks=blocks, max_len=32, budget=16, rows=2, groups=groups, depth=depth)
    engine.pin("one", PROMPT)
    engine.run()
    (state,) = engine.scheduler.pins.states()
    span = max(engine.kv.spans)
    assert state.held and state.num_tokens == len(PROMPT) // span * span and state.num_blocks == len(engine.pool.pinned)
    flood(engine)
    assert engine.pool.counts.evicted > blocks, "the flood was too small to evict"
    hits, saved = engine.scheduler.stats.pin_hits, engine.scheduler.stats.pin_tokens
    assert found(engine, "later", [*PROMPT, 1, 2, 3]) == (state.num_tokens, state.num_tokens)
    assert (engine.scheduler.stats.pin_hits - hits, engine.scheduler.stats.pin_tokens - saved) == (1, state.num_tokens)
    engine.unpin("one")
    flood(engine)
    assert found(engine, "last", [*PROMPT, 1, 2, 3])[1] == 0
    engine.assert_idle()
    engine.assert_exact()


def test_a_pin_helps_only_requests_with_its_salt() -> None:
    engine = FakeEngine(max_len=32)
    engine.pin("one", PROMPT, salt="mine")
    engine.run()
    assert found(engine, "without", [*PROMPT, 1]) == (0, 0)
    assert found(engine, "theirs", [*PROMPT, 1], "theirs") == (0, 0)
    assert found(engine, "mine", [*PROMPT, 1], "mine") == (24, 24)
    assert engine.scheduler.pins.states()[0].hits == 1


# promise: max-pinned-blocks, pinned-prefix
def test_a_refusal_has_the_numbers_and_leaves_nothing() -> None:
    engine = FakeEngine(num_blocks=20, max_len=32, pinned=8)  # 19 blocks, 8 of them for the longest request
    engine.pin("one", PROMPT)  # 6 blocks
    with pytest.raises(RequestError, match=r"needs 3 blocks and 6 are pinned, but at most 8 may be .--max-pinned-blocks"):
        engine.pin("two", OTHERS[1][:12])
    with pytest.raises(RequestError, match=r"the prompt has 3 tokens.*at least 4"):
        engine.pin("two", [1, 2, 3])
    engine.pin("two", [*PROMPT[:24], 9, 9, 9, 9])  # shares all blocks but its last
    assert engine.scheduler.pins.num_blocks == 7
    engine.run()
    assert len(engine.pool.pinned) == 7 and engine.scheduler.snapshot().pinned_blocks == 7
    engine.unpin("one")
    assert len(engine.pool.pinned) == 7, "the other pin still holds all of them"
    engine.unpin("two")
    engine.assert_idle()
    off = FakeEngine(caching=False)
    with pytest.raises(RequestError, match=r"prefix caching is off"):
        off.pin("one", PROMPT)


def test_pins_leave_room_for_the_longest_request_and_for_searches() -> None:
    engine = FakeEngine(num_blocks=14, max_len=32)  # 13 blocks, 8 of them for the longest request
    with pytest.raises(RequestError, match=r"needs 6 blocks and 0 are pinned, but of the 13 blocks.* 8 must stay for a request of 32"):
        engine.pin("one", PROMPT)
    engine.pin("one", PROMPT[:20])
    engine.run()
    engine.add("longest", OTHERS[0], sampling(12))
    engine.run()
    with pytest.raises(RequestError, match=r"beams may grow to .* the KV cache has 8 beside 5 pinned ones"):
        engine.add("search", PROMPT[:8], sampling(12, n=2), beams=Beams(2))
    engine.unpin("one")
    engine.add("search", PROMPT[:8], sampling(12, n=2), beams=Beams(2))
    with pytest.raises(RequestError, match=r"must stay for a beam search that runs"):
        engine.pin("one", OTHERS[2])
    engine.run()
    engine.assert_idle()
    engine.assert_exact()


def test_a_pin_ends_in_the_middle_of_its_use_and_nobody_notices() -> None:
    engine = FakeEngine(num_blocks=40, max_len=40)
    engine.pin("timed", PROMPT, seconds=6)
    engine.pin("deleted", OTHERS[0])
    engine.run()
    engine.add("one", [*PROMPT, 1], sampling(8))
    engine.add("two", [*OTHERS[0], 1], sampling(8))
    engine.step()
    assert engine.pool.ref[next(iter(engine.pool.pinned))] == 2
    engine.unpin("deleted")
    while engine.scheduler.step < 8:
        engine.step()
    engine.scheduler.pins.expire()
    assert not engine.scheduler.pins.states() and engine.scheduler.running
    assert engine.scheduler.pins.seconds_left() is None
    engine.run()
    engine.assert_idle()
    engine.assert_exact()


def test_emptying_the_cache_leaves_pins_and_what_is_being_pinned() -> None:
    engine = FakeEngine(num_blocks=40, max_len=40, budget=8)
    engine.pin("one", PROMPT)
    engine.run()
    engine.pin("two", OTHERS[0])
    engine.step()  # the first of its chunks
    assert engine.scheduler.running[0].num_sealed
    engine.pool.forget()
    engine.run()
    assert found(engine, "first", [*PROMPT, 1]) == (24, 24)
    assert found(engine, "second", [*OTHERS[0], 1]) == (20, 20)


def test_what_somebody_else_has_computed_first_is_held_where_the_cache_finds_it() -> None:
    engine = FakeEngine(num_blocks=40, max_len=40, budget=8, rows=2)
    engine.pin("one", PROMPT)
    engine.step()
    engine.add("aloof", PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0))  # reads no cache, so it computes copies
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.pool.forget()  # so that the other one is ahead
    engine.run()
    assert found(engine, "later", [*PROMPT, 1]) == (24, 24)
    engine.unpin("one")
    engine.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pin_that_is_preempted_on_its_last_step_is_computed_again(depth: int) -> None:
    engine = FakeEngine(max_len=40, depth=depth)
    engine.pin("one", PROMPT)
    engine.executor.after_forward.append(lambda: engine.scheduler._preempt(engine.scheduler.running[-1]))
    engine.run()
    assert engine.ends["one", 0].finish_reason == "length" and engine.scheduler.stats.preemptions == 1
    assert found(engine, "later", [*PROMPT, 1]) == (24, 24)


def test_whoever_computes_it_first_makes_the_pin_and_the_last_that_fails_ends_it() -> None:
    engine = FakeEngine(max_len=40, budget=8)
    engine.pin("one", PROMPT)
    engine.pin("one", PROMPT, request="again")
    with pytest.raises(RequestError, match=r"there is a prefix with the name 'one'"):
        engine.pin("one", OTHERS[0], request="another")
    engine.abort("one")
    assert "one" in engine.scheduler.pins
    engine.run()
    assert found(engine, "later", [*PROMPT, 1]) == (24, 24)
    engine.pin("two", OTHERS[0])
    engine.step()
    engine.faults.poison = {0}
    engine.run()
    assert engine.ends["two", 0].finish_reason == "error" and "two" not in engine.scheduler.pins
    engine.pin("three", OTHERS[1])
    engine.step()
    engine.unpin("three")
    engine.run()
    assert engine.ends["three", 0].finish_reason == "abort"
    engine.unpin("one")
    engine.unpin("one")
    engine.assert_idle()


def test_counts_of_engines_before_go_on() -> None:
    engine = FakeEngine(max_len=40)
    engine.add("one", PROMPT, COMPUTE, pin=PinOrder("one", None, hits=3, tokens_saved=72))
    engine.run()
    found(engine, "later", [*PROMPT, 1])
    (state,) = engine.scheduler.pins.states()
    assert (state.hits, state.tokens_saved) == (4, 96)
    assert engine.scheduler.stats.pin_hits == 1
