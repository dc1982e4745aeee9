"""A bound on the policy room's speed, loose enough for a busy machine; the figures come from `bench/policy_speed.py`."""

import time

import pytest

from bench.policy_speed import measure


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.timed("the scheduler's speed")
def test_a_hundred_thousand_sequence_steps_a_second_of_cpu_time(aligned: bool, depth: int) -> None:
    best = max(measure(aligned, depth, steps=100, clock=time.thread_time).per_second for _ in range(3))
    assert best >= 100_000, f"{best:,.0f} sequence-steps a second"
