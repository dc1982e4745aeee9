"""A bound on the policy room's speed, loose enough for a busy machine; the figures come from `bench/policy_speed.py`."""

import time

import pytest

from bench.policy_speed import burst, full_pool, measure


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.timed("the scheduler's speed")
def test_a_hundred_thousand_sequence_steps_a_second_of_cpu_time(aligned: bool, depth: int) -> None:
    best = max(measure(aligned, depth, steps=100, clock=time.thread_time).per_second for _ in range(3))
    assert best >= 100_000, f"{best:,.0f} sequence-steps a second"


@pytest.mark.timed("what requests that wait cost every step")
def test_requests_that_wait_cost_the_running_ones_little() -> None:
    scheduled = min(full_pool(clock=time.thread_time) for _ in range(2))
    assert scheduled < 1, f"schedule() takes {scheduled:.2f} ms while 39 long prompts wait for blocks"
    slowest = min(burst(common, requests=200, clock=time.thread_time).slowest_ms for common in (16_000, 16_000))
    assert slowest < 20, f"a step took {slowest:.1f} ms while a burst was matched"
