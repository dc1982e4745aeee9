"""Recurrent models on FakeKV: a step reads one state slot and writes another, and prefixes are continued from states that were kept."""

from random import Random

import pytest

from octavo.errors import RequestError
from octavo.messages import Beams, StepPlan
from octavo.policy.state_pool import StatePool
from octavo.policy.states import States, grid
from octavo.worker.fake_runner import FakeRunner
from tests.support.fake import GROUPS, VOCAB, FakeEngine, sampling

PROMPT = [(7 * i + i * i // 3) % VOCAB for i in range(29)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def text(seed: int, count: int) -> list[int]:
    return [Random(seed).randrange(VOCAB) for _ in range(1)] + [Random(seed * 1000 + i).randrange(VOCAB) for i in range(count - 1)]


def busy(depth: int, preempt_every: int, groups: int = 0, states: int = 6, caching: bool = True) -> FakeEngine:
    """Samples that fork after a prompt computed in chunks, beams, prefixes that are found, and rows that others have had before."""
    engine = FakeEngine(
        block_size=4, num_blocks=90, rows=5, budget=9, depth=depth, preempt_every=preempt_every, groups=GROUPS[groups],
        caching=caching, states=states,
    )  # fmt: skip
    for number in range(6):
        engine.add(str(number), PROMPT[: 5 + 4 * number], sampling(12, n=1 + number % 3, seed=number))
    engine.add("beams", PROMPT[:11], sampling(6), beams=Beams(3))
    return engine


@DEPTHS
@pytest.mark.parametrize("preempt_every", [0, 3])
@pytest.mark.parametrize("states", [0, 1, 6])
def test_no_schedule_changes_a_text(depth: int, preempt_every: int, states: int) -> None:
    for groups in (0, 2):
        engine = busy(depth, preempt_every, groups, states)
        engine.run()
        for number in range(6):  # the same again, which now are found as far as states were kept
            engine.add(f"again {number}", PROMPT[: 5 + 4 * number], sampling(12, n=1 + number % 3, seed=number))
        engine.run()
        engine.assert_exact()
        engine.assert_idle()
        stats = engine.scheduler.stats
        assert any(plan.row_forks for plan in engine.executor.plans) and (stats.preemptions > 0) == (preempt_every > 0)
        assert (stats.prefix_hits > 0) == (states > 0)


def test_a_checkpoint_of_other_tokens_changes_a_text() -> None:
    engine = busy(2, 3)
    engine.check = False  # a block may be sealed with what is wrong
    states = engine.kv.states
    assert states is not None
    use = states.pool.use
    states.pool.use = lambda key: use(next(reversed(states.pool.index)))  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        engine.run()
        engine.assert_exact()


def test_a_runner_refuses_a_plan_that_writes_what_a_row_reads() -> None:
    engine = FakeEngine(states=4)
    engine.add("one", PROMPT)
    engine.add("two", PROMPT[1:])
    forward = FakeRunner.forward

    def race(plan: StepPlan) -> None:
        if len(plan.states) > 1:
            plan.states[1] = plan.states[1][0], plan.states[0][0] or plan.states[0][1]
        forward(engine.runner, plan)

    engine.runner.forward = race  # type: ignore[method-assign]
    engine.run()
    assert "reads state slots" in (engine.ends["one", 0].error or "")


# --- what is found again


def hybrid(states: int = 40, block_size: int = 16, budget: int = 512, blocks: int = 4000) -> FakeEngine:
    return FakeEngine(block_size=block_size, num_blocks=blocks, rows=4, budget=budget, max_len=20_000, states=states, check=False)


def found(engine: FakeEngine, name: str, prompt: list[int], count: int = 1, checkpoints: list[int] | None = None) -> int:
    """Runs a request, and returns how many of its tokens were found."""
    request = engine.add(name, prompt, sampling(count), checkpoints=checkpoints)
    engine.run()
    return request.life.cached_tokens


def test_a_second_turn_computes_at_most_a_block_of_the_first_again() -> None:
    for length in (300, 304, 333, 1000):
        engine = hybrid()
        first = text(length, length)
        found(engine, "first", first, 77)
        answer = engine.tokens["first", 0]
        known = len(first) + len(answer) - 1  # the last token is never computed
        assert found(engine, "second", first + answer + text(1, 50)) > known - 16
        engine.assert_exact()


def test_a_system_prompt_is_found_by_the_second_conversation() -> None:
    engine, system = hybrid(), text(5, 1234)
    found(engine, "first", system + text(6, 700), 20, [1234])
    request = engine.add("second", system + text(7, 700), checkpoints=[1234])
    engine.run()
    assert request.life.cached_tokens == 1232 == request.life.common_tokens and request.life.hit_reason == "differs"


@pytest.mark.parametrize("shared", [100, 300, 1111, 5000, 9999])
def test_any_shared_prefix_is_found_mostly_the_second_time_and_wholly_the_third(shared: int) -> None:
    engine, prefix = hybrid(), text(shared, shared)
    common = shared // 16 * 16
    assert found(engine, "first", prefix + text(1, 400)) == 0
    second = engine.add("second", prefix + text(2, 400))
    engine.run()
    assert second.life.common_tokens == common and common - second.life.cached_tokens <= max(256, shared // 4)
    assert second.life.hit_reason in ("no_state", "differs")
    assert found(engine, "third", prefix + text(3, 400)) == common
    engine.assert_exact()


def test_requests_that_wait_for_a_prefix_find_the_state_after_it() -> None:
    engine, prefix = hybrid(), text(9, 1111)
    for number in range(3):
        engine.add(str(number), prefix + text(20 + number, 100))
    engine.run()
    assert [engine.asked[str(number)][1].life.cached_tokens for number in range(3)] == [0, 1104, 1104]
    engine.assert_exact()


def test_chunks_do_not_move_checkpoints_and_cost_no_further_steps() -> None:
    kept = []
    for budget in (64, 100, 512, 8192):
        engine = hybrid(budget=budget)
        found(engine, "one", text(3, 3000), 1, [700])
        states = engine.kv.states
        assert states is not None and engine.runner.num_computed == 3000 and len(engine.executor.plans) == -(-3000 // budget)
        kept.append(sorted(states.pool.index))
    assert all(one == kept[0] for one in kept) and len(kept[0]) == len([at for at in grid(2999, 16) if at < 3000]) + 2


def test_the_least_valuable_checkpoint_is_evicted_first() -> None:
    pool = StatePool(4)
    slots = [pool.take() for _ in range(3)]
    for slot, (key, worth) in zip(slots, [(b"a", 100), (b"b", 1000), (b"c", 300)]):
        pool.seal(slot, key, worth)
        pool.release(slot)
    assert pool.take() == slots[0] and b"a" in pool.evicted  # saves the fewest tokens
    pool.release(slots[0])
    pool.seal(pool.take(), b"d", 250)  # 100 + 250
    pool.release(slots[0])
    pool.release(pool.use(b"c"))  # 100 + 300
    taken = [pool.take() for _ in range(3)]
    assert taken == [slots[0], slots[2], slots[1]]
    for slot in taken:
        pool.release(slot)
    pool.check()


def test_a_pinned_prefix_is_found_however_many_states_others_keep() -> None:
    engine = hybrid(states=4)
    engine.pin("pin", text(1, 1000))
    engine.run()
    for number in range(8):
        found(engine, str(number), text(50 + number, 2000), 40)
    assert found(engine, "user", text(1, 1000) + text(2, 30)) == 992
    engine.pin("pin 2", text(70, 64))
    engine.run()
    with pytest.raises(RequestError, match="at most 2 may be pinned; raise --state-cache-share"):
        engine.pin("pin 3", text(80, 64))
    engine.unpin("pin")
    engine.unpin("pin 2")
    engine.assert_idle()


def test_a_reset_cache_has_no_states() -> None:
    engine = hybrid()
    found(engine, "one", PROMPT * 20)
    engine.kv.forget()
    assert found(engine, "two", PROMPT * 20) == 0
    engine.assert_exact()


def test_an_evicted_state_is_named_as_the_reason() -> None:
    engine = hybrid(states=3, blocks=10_000)
    prefix = text(1, 1600)
    found(engine, "one", prefix + text(2, 100))
    for number in range(6):
        found(engine, str(number), text(50 + number, 1600))
    request = engine.add("again", prefix + text(3, 100))
    engine.run()
    assert request.life.common_tokens == 1600 > request.life.cached_tokens and request.life.hit_reason == "state_evicted"


def test_states_are_counted() -> None:
    engine, prefix = hybrid(states=8), text(1, 1600)
    found(engine, "one", prefix + text(2, 100))
    for number in range(6):
        found(engine, str(number), text(50 + number, 1600))
    again = engine.add("again", prefix + text(3, 100), sampling(40))
    for _ in range(5):
        engine.step()
    during = engine.scheduler.snapshot()
    assert during.state_slots == 16 and during.held_states == 1  # what the last step read is not held
    engine.run()
    end = engine.scheduler.snapshot()
    assert end.held_states == 0 and 0 < end.checkpoints <= 16
    assert end.checkpoints_kept >= end.checkpoints + end.checkpoints_evicted > 16  # some were replaced
    assert end.stateless_tokens == again.life.common_tokens - again.life.cached_tokens > 0
    assert end.checkpoints_used == (again.life.cached_tokens > 0)


def test_an_agents_conversations_find_nearly_all_that_was_computed_before() -> None:
    """Four conversations with one system prompt: a first turn of 20,000 tokens, and 12 turns of 800."""
    system, best, hits = text(1, 4000), 0, 0
    engine = FakeEngine(block_size=16, num_blocks=10_000, rows=4, budget=2048, max_len=40_000, states=100, check=False)
    histories = [system + text(10 + number, 16_000) for number in range(4)]
    for turn in range(13):
        for number, history in enumerate(histories):
            if turn:
                history += text(1000 * turn + number, 792)
            request = engine.add(f"{number} {turn}", history, sampling(8), checkpoints=[4000, len(history) - 5])
            engine.run()
            hits += request.life.cached_tokens
            best += len(history) - 793 if turn else 4000 * (number > 0)
            history += engine.tokens[f"{number} {turn}", 0]
    assert hits >= 0.95 * best


def test_a_step_takes_two_slots_of_each_row_whatever_is_kept() -> None:
    states = States(1 + 2 * 8 + 5, 8, 4, 1000, True)
    assert states.most_pinned == 2
    engine = FakeEngine(rows=8, budget=40, states=5, num_blocks=400, block_size=4)
    for number in range(30):
        engine.add(str(number), text(number, 30 + number), sampling(40))
    engine.run()
    engine.assert_exact()
    engine.assert_idle()
