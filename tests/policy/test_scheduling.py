"""Who gets the tokens of a step: decode first, prefills share, nobody starves, thrash ends."""

import random
from itertools import pairwise

import pytest

from octavo.policy.admission import MAX_PASSES
from tests.support.fake import FakeEngine, sampling
from tests.support.soaked import rarely

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def _prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt + i * i * salt) % 50 for i in range(length)]


def _tokens_of_step(engine: FakeEngine) -> dict[str, int]:
    """Request -> positions the last plan computes for it."""
    plan = engine.executor.plans[-1]
    owner = {seq.seq_id: seq.request.request_id for seq in engine.scheduler.running}
    return {owner.get(seq_id, "ended"): count for seq_id, count in zip(plan.seq_id, plan.num_query)}


@DEPTHS
def test_decode_gets_a_token_every_step_while_older_and_newer_prefills_run(depth: int) -> None:
    engine = FakeEngine(block_size=16, num_blocks=600, rows=8, budget=32, depth=depth)
    engine.add("old prefill", _prompt(1500, 9), sampling(2))
    engine.step()
    for number in range(3):
        engine.add(f"decode {number}", _prompt(4, number), sampling(40))
    for _ in range(4):
        engine.step()
    for number in range(4):
        engine.add(f"prefill {number}", _prompt(300, 10 + number), sampling(2))
    engine.run()
    engine.assert_exact()
    for number in range(3):
        steps = engine.token_steps[f"decode {number}", 0]
        assert all(later - earlier == 1 for earlier, later in pairwise(steps))
    assert engine.token_steps["decode 2", 0][-1] < engine.token_steps["old prefill", 0][0], "decode did not run beside the prefill"


def test_running_prefills_leave_half_of_what_decode_leaves_to_those_who_wait() -> None:
    engine = FakeEngine(block_size=16, num_blocks=600, rows=8, budget=42)
    engine.add("decode 1", _prompt(2, 1), sampling(50))
    engine.add("decode 2", _prompt(2, 2), sampling(50))
    engine.step()
    engine.add("long", _prompt(1000, 3))
    engine.step()
    assert _tokens_of_step(engine) == {"decode 1": 1, "decode 2": 1, "long": 40}, "alone it takes all that decode leaves"
    engine.add("other", _prompt(500, 4))
    engine.step()
    assert _tokens_of_step(engine) == {"decode 1": 1, "decode 2": 1, "long": 20, "other": 20}


def test_who_waited_too_long_and_was_never_admitted_ends_oldest_first_whatever_its_priority() -> None:
    engine = FakeEngine(rows=1, by_priority=True, num_blocks=40)
    engine.add("runs", _prompt(3), sampling(60))
    engine.step()
    engine.add("late", _prompt(4, 1), sampling(4, n=1), priority=-1)
    engine.step()
    engine.add("in time", _prompt(4, 2), priority=-5)
    engine.step()
    assert engine.expire(3) == []
    (delta,) = engine.expire(2)
    assert (delta.request_id, delta.finish_reason, delta.code) == ("late", "error", "queue_timeout")
    assert delta.error == "waited 2.0 s in the queue, queue_timeout is 2 s" and delta.life is not None and delta.life.finished == 3
    engine.run()
    assert engine.expire(0) == []
    assert [engine.reason(name) for name in ("runs", "in time")] == ["length", "length"]
    engine.assert_idle()


def test_a_preempted_request_is_not_late() -> None:
    engine = FakeEngine(rows=1)
    engine.add("runs", _prompt(3), sampling(20))
    engine.step()
    engine.preempt_last()
    engine.step()
    assert engine.scheduler.waiting and engine.expire(0) == []
    engine.run()
    engine.assert_exact()


@DEPTHS
def test_short_requests_start_within_three_steps_beside_a_very_long_prompt_which_keeps_its_half(depth: int) -> None:
    rng = random.Random(7)
    engine = FakeEngine(block_size=16, num_blocks=1200, rows=16, budget=64, depth=depth, check=False)
    engine.add("long", _prompt(200 * 64, 1), sampling(1))
    added: dict[str, int] = {}
    of_long = of_shorts = 0
    for _ in range(200):
        for _ in range(rng.choice([0, 1, 1, 2])):  # 14 tokens a step, bursts of 46; the long one leaves 32
            name = f"short {len(added)}"
            engine.add(name, _prompt(rng.randrange(6, 24), len(added) + 5), sampling(3))
            added[name] = engine.scheduler.step
        engine.step()
        tokens = _tokens_of_step(engine)
        shorts = sum(count for name, count in tokens.items() if name != "long" and count > 1)
        if shorts:
            of_long, of_shorts = of_long + tokens.get("long", 0), of_shorts + shorts
    waits = sorted(engine.token_steps[name, 0][0] - step for name, step in added.items() if engine.token_steps[name, 0])
    assert len(added) - len(waits) <= 2 and len(waits) > 180
    withheld = depth - 1  # results come that many steps later
    assert waits[int(len(waits) * 0.99)] <= 3 + withheld and waits[-1] <= 5 + withheld, f"steps to the first token: {waits[-9:]}"
    assert of_long >= of_shorts, f"the long prompt got {of_long} tokens while shorts took {of_shorts}"
    engine.abort("long")
    engine.run()
    engine.assert_exact({"long"})


@DEPTHS
def test_a_prefill_that_started_is_not_starved_by_an_older_one(depth: int) -> None:
    """Admitted for part of its prompt, it shares with the long one ahead instead of getting a token a step."""
    engine = FakeEngine(block_size=16, num_blocks=600, rows=4, budget=64, depth=depth)
    engine.add("long", _prompt(5000, 1), sampling(1))
    engine.step()
    engine.add("middle", _prompt(150, 2), sampling(1))
    start = engine.scheduler.step
    while not engine.token_steps["middle", 0]:
        engine.step()
    assert engine.token_steps["middle", 0][0] - start <= 150 // 32 + depth
    engine.abort("long")
    engine.run()
    engine.assert_exact({"long"})


@pytest.mark.parametrize(("caching", "depth"), [(True, 2), (False, 1), *rarely((True, 1), (False, 2))])
def test_requests_that_fill_the_pool_alone_finish_without_thrashing(caching: bool, depth: int) -> None:
    engine = FakeEngine(block_size=4, num_blocks=1 + 26, rows=32, budget=256, depth=depth, caching=caching)
    prompt, count = 32, 64  # 24 blocks; the pool has 1.1 times as many
    requests = [engine.add(str(number), _prompt(prompt, number + 1), sampling(count)) for number in range(32)]
    engine.run()
    engine.assert_exact()
    engine.assert_idle()
    assert engine.runner.num_computed < 4 * 32 * (prompt + count - 1)
    assert max(request.life.preemptions for request in requests) <= 8


def test_a_preempted_request_comes_back_only_with_room_to_go_on() -> None:
    """It would fit as it is, but both together outgrow the pool: it waits for the other's end instead of being preempted again."""
    engine = FakeEngine(block_size=4, num_blocks=18, rows=2)
    engine.add("stays", _prompt(20, 1), sampling(20))
    life = engine.add("leaves", _prompt(20, 2), sampling(20)).life
    engine.step()
    engine.preempt_last()
    engine.step()
    assert engine.pool.num_free >= 6 + 2, "it would fit"
    while ("stays", 0) not in engine.ends:
        engine.step()
        assert len(engine.scheduler.running) < 2
    engine.run()
    engine.assert_exact()
    assert life.preemptions == 1


def test_a_head_that_does_not_fit_is_passed_for_sixteen_steps_and_no_more() -> None:
    engine = FakeEngine(block_size=4, num_blocks=21, rows=8, budget=64)
    engine.add("runs", _prompt(20, 1), sampling(50))
    engine.step()
    head = engine.add("big", _prompt(64, 2), sampling(4)).sequences[0]
    passed = []
    for number in range(40):
        engine.add(f"small {number}", _prompt(3, number + 9), sampling(1))
        engine.step()
        passed.append((f"small {number}", 0) in engine.ends)
    assert passed == [True] * MAX_PASSES + [False] * (40 - MAX_PASSES) and head.steps_passed == MAX_PASSES
    engine.run()
    engine.assert_exact()
    first_small = engine.token_steps[f"small {MAX_PASSES}", 0][0]
    assert engine.token_steps["big", 0][0] <= first_small, "nobody passes after that"


@DEPTHS
def test_big_requests_are_not_starved_by_a_stream_of_small_ones_nor_small_ones_stuck_behind_them(depth: int) -> None:
    engine = FakeEngine(block_size=4, num_blocks=33, rows=6, budget=64, depth=depth)
    waits: dict[str, int] = {}
    for step in range(400):
        if step % 100 == 10:
            engine.add(f"big {step}", _prompt(100, step), sampling(8))
        if step % 2 == 0:
            engine.add(f"small {step}", _prompt(5, step + 1), sampling(8))
        engine.step()
    engine.run()
    engine.assert_exact()
    for name, (_, request) in engine.asked.items():
        assert request.life.first_scheduled is not None
        waits[name] = int(request.life.first_scheduled - request.life.queued)
    assert max(wait for name, wait in waits.items() if name.startswith("big")) <= 2 * MAX_PASSES + 12, "one passes it every other step"
    assert max(wait for name, wait in waits.items() if name.startswith("small")) <= 40


def test_requests_with_many_samples_get_their_rows_although_single_ones_keep_coming() -> None:
    engine = FakeEngine(rows=4, num_blocks=200)
    engine.add("first", _prompt(3, 1), sampling(12))
    engine.add("many", _prompt(3, 2), sampling(3, n=4))
    for step in range(80):
        engine.add(f"single {step}", _prompt(3, step + 3), sampling(3))
        engine.step()
    life = engine.asked["many"][1].life
    assert life.first_scheduled is not None and life.first_scheduled - life.queued <= MAX_PASSES + 13
    engine.run()
    engine.assert_exact()


# promise: scheduling-policy-fcfs
@DEPTHS
def test_priority_orders_admission_and_preemption_takes_the_last(depth: int) -> None:
    engine = FakeEngine(rows=1, by_priority=True, depth=depth)
    for name, priority in [("c", 5), ("b", 0), ("a", -3), ("b2", 0)]:
        engine.add(name, _prompt(4, ord(name[-1])), sampling(2), priority)
    engine.run()
    assert sorted(engine.token_steps, key=lambda key: engine.token_steps[key][0]) == [("a", 0), ("b", 0), ("b2", 0), ("c", 0)]
    small = FakeEngine(block_size=2, num_blocks=17, rows=3, by_priority=True, depth=depth)
    lives = {name: small.add(name, _prompt(4, at), sampling(20), at).life for at, name in [(3, "low"), (1, "high"), (2, "middle")]}
    small.run()
    small.assert_exact()
    assert lives["high"].preemptions == 0 < lives["low"].preemptions
    assert small.token_steps["high", 0][-1] < small.token_steps["low", 0][-1]


def test_by_default_priority_is_ignored() -> None:
    engine = FakeEngine(rows=1)
    engine.add("first", _prompt(4, 1), sampling(2), priority=9)
    engine.add("second", _prompt(4, 2), sampling(2), priority=-9)
    engine.run()
    assert engine.token_steps["first", 0][0] < engine.token_steps["second", 0][0]


@DEPTHS
def test_the_oldest_runs_on_while_the_pool_is_too_small_for_all(depth: int) -> None:
    engine = FakeEngine(block_size=2, num_blocks=14, rows=4, depth=depth)
    lives = [engine.add(str(number), _prompt(4, number), sampling(20)).life for number in range(4)]
    engine.run()
    engine.assert_exact()
    assert lives[0].preemptions == 0 < sum(life.preemptions for life in lives)
    steps = engine.token_steps["0", 0]
    assert all(later - earlier == 1 for earlier, later in pairwise(steps))


def test_a_step_that_preempts_admits_nobody() -> None:
    engine = FakeEngine(block_size=2, num_blocks=14, rows=4)
    for number in range(6):
        engine.add(str(number), _prompt(4, number), sampling(20))
    preemptions = 0
    while engine.core.has_work:
        engine.step()
        now = engine.scheduler.stats.preemptions
        if now > preemptions:
            assert not engine.executor.plans[-1].row_writes
        preemptions = now
    assert preemptions > 0
    engine.assert_exact()


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_work_at_the_same_time_on_different_sequences(stages: int) -> None:
    """As many plans are in flight as there are stages, of about equal size, and no sequence is in two of them."""
    engine = FakeEngine(rows=7, budget=84, stages=stages)
    for number in range(7):
        engine.add(str(number), _prompt(4, number), sampling(30))
    engine.step()
    in_flight: list[int] = []
    while engine.core.has_work:
        engine.step()
        in_flight.append(len(engine.core._launched))
    engine.assert_exact()
    plans = [plan for plan in engine.executor.plans[1:] if len(engine.executor.plans) - plan.step > 3 * stages]
    assert all(len(plan.row) in (7 // stages, -(-7 // stages)) for plan in plans)
    for plan, *others in zip(*(plans[first:] for first in range(stages))):
        assert not set(plan.seq_id) & {seq_id for other in others for seq_id in other.seq_id}
    assert in_flight.count(stages - 1) > len(in_flight) * 0.8, "a result is taken when all stages have work"


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    engine = FakeEngine(rows=2, budget=16, stages=2, num_blocks=64)
    engine.add("long", _prompt(60, 1), sampling(2))
    engine.step()
    engine.step()
    assert [plan.num_query for plan in engine.executor.plans] == [[8], [8]] and len(engine.core._launched) == 1
    engine.run()
    engine.assert_exact()


# promise: life-record-per
def test_a_life_record_tells_what_happened_and_when() -> None:
    engine = FakeEngine(block_size=4, rows=1, budget=8)
    engine.add("before", _prompt(10, 1), sampling(3))
    life = engine.add("r", _prompt(10, 1) + [1, 2, 3], sampling(5)).life
    assert (life.queued, life.first_scheduled, life.first_token, life.finished, life.hit_reason) == (0.0, None, None, None, None)
    for _ in range(6):  # 2 steps of prefill and 2 of decode for the one before, then 2 of its own
        engine.step()
    engine.preempt_last()
    engine.run()
    engine.assert_exact()
    assert (life.first_scheduled, life.first_token, life.finished) == (5.0, 5.0, 10.0)
    assert (life.cached_tokens, life.hit_reason) == (8, "differs")
    assert (life.preemptions, life.recomputed_tokens) == (1, 2)  # 14 computed, 12 of them found again
    assert engine.ends["r", 0].life is life
