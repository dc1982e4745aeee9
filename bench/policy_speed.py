"""Measures how fast the policy plans: `python bench/policy_speed.py`.

256 sequences decode. A step is `schedule` plus `update`, with made-up tokens in place of a runner. In the worst case, aligned,
all sequences fill a block in the same step, so each seals a block and takes a new one. Spread, a sixteenth of them does so in
every step. Figures are medians over runs; the slowest step is the slowest of one run.

Then one sequence decodes while others wait. Full pool: 39 prompts of 62k tokens, of which 29k are cached, do not fit. Burst: 1,000
prompts of 16k tokens arrive at once, with a common beginning of 16,000, 8,192 or no tokens.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.messages import AddRequest, Limits, StepPlan, StepResult
from octavo.policy.block_pool import BlockPool
from octavo.policy.kv_manager import KVManager
from octavo.policy.scheduler import Scheduler
from octavo.sampling_params import SamplingParams

ROWS, BLOCK, MAX_LEN = 256, 16, 2048


@dataclass(frozen=True, slots=True)
class Speed:
    per_second: float  # sequence-steps
    slowest_ms: float
    median_ms: float


def _scheduler(aligned: bool) -> Scheduler:
    num_blocks = ROWS * MAX_LEN // BLOCK
    kv = KVManager(BlockPool(num_blocks), BLOCK, caching=True, key=b"bench", identity=b"bench")
    scheduler = Scheduler(kv, Limits(ROWS, ROWS * 4 * BLOCK, MAX_LEN, 50_000, num_blocks, BLOCK))
    for number in range(ROWS):
        length = 2 * BLOCK if aligned else BLOCK + number % BLOCK
        scheduler.add(AddRequest(str(number), [number] * length, SamplingParams(max_tokens=1024, ignore_eos=True)))
    return scheduler


def measure(aligned: bool, depth: int, steps: int = 400, clock: Callable[[], float] = time.perf_counter) -> Speed:
    """Returns the seconds of `steps` full decode steps. At depth 2 a plan is updated after the next one was made."""
    scheduler = _scheduler(aligned)
    launched: list[StepPlan] = []
    seconds: list[float] = []
    while len(seconds) < steps:
        start = clock()
        launched.append(scheduler.schedule())
        took = clock() - start
        if len(launched) < depth:
            continue
        plan = launched.pop(0)
        result = StepResult(plan.step, [[plan.step % 1000 + 7] if outputs else [] for outputs in plan.outputs])
        start = clock()
        scheduler.update(plan, result)
        took += clock() - start
        if len(plan.row) == ROWS == sum(plan.num_query):
            seconds.append(took)
    return Speed(ROWS * steps / sum(seconds), max(seconds) * 1e3, statistics.median(seconds) * 1e3)


def _step(scheduler: Scheduler, clock: Callable[[], float]) -> tuple[float, float, list[str]]:
    """Runs a step. Returns the seconds of `schedule` and of the whole step, and the requests that received a token."""
    start = clock()
    plan = scheduler.schedule()
    scheduled = clock() - start
    result = StepResult(plan.step, [[plan.step % 1000 + 7] if outputs else [] for outputs in plan.outputs])
    start = clock()
    deltas = scheduler.update(plan, result)
    return scheduled, scheduled + clock() - start, [delta.request_id for delta in deltas if delta.token_ids]


def _with_a_stream(num_blocks: int, prompt: list[int]) -> Scheduler:
    kv = KVManager(BlockPool(num_blocks), BLOCK, caching=True, key=b"bench", identity=b"bench")
    scheduler = Scheduler(kv, Limits(ROWS, 8192, 131_072, 50_000, num_blocks, BLOCK))
    scheduler.add(AddRequest("stream", prompt, SamplingParams(max_tokens=4000, ignore_eos=True)))
    while scheduler.requests["stream"].life.first_token is None:
        _step(scheduler, time.perf_counter)
    return scheduler


def full_pool(waiting: int = 39, length: int = 62_000, cached: int = 29_000, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the median of `schedule` in ms over 200 steps, once all that wait are matched."""
    prefix = list(range(cached))
    scheduler = _with_a_stream(length // BLOCK + 300, prefix + [1] * (length - cached))
    for number in range(waiting):
        scheduler.add(AddRequest(str(number), prefix + [2 + number] * (length - cached), SamplingParams()))
    seconds = [_step(scheduler, clock)[0] for _ in range(250)]
    assert len(scheduler.waiting) == waiting
    return statistics.median(seconds[50:]) * 1e3


@dataclass(frozen=True, slots=True)
class Burst:
    slowest_ms: float  # step
    first_tokens: tuple[float, float, float]  # seconds of policy until a tenth, half and nine tenths have their first token


def burst(common: int, requests: int = 1000, length: int = 16_384, clock: Callable[[], float] = time.perf_counter) -> Burst:
    scheduler = _with_a_stream(60_000, [1] * BLOCK)
    beginning = list(range(common))
    for number in range(requests):
        prompt = beginning + [number] * (length - common)
        scheduler.add(AddRequest(str(number), prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    seconds: list[float] = []
    first: dict[str, float] = {}
    gc.collect()
    gc.freeze()  # as an engine does before it serves
    while len(first) <= requests:
        _, took, received = _step(scheduler, clock)
        seconds.append(took)
        for request_id in received:
            first.setdefault(request_id, sum(seconds))
    at = sorted(first.values())
    return Burst(max(seconds) * 1e3, (at[requests // 10], at[requests // 2], at[requests * 9 // 10]))


def main() -> None:
    parser = argparse.ArgumentParser(description="sequence-steps a second of the policy room, runner excluded")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--cpu-time", action="store_true", help="count this thread's CPU time, for a machine with other work")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print(f"{ROWS} sequences, blocks of {BLOCK}, {options.steps} steps, medians over {options.runs} runs")
    print(f"{'edges':8} {'depth':>5} {'sequence-steps/s':>17} {'median step':>12} {'slowest step':>13}")
    for aligned in (False, True):
        for depth in (1, 2):
            runs = [measure(aligned, depth, options.steps, clock) for _ in range(options.runs)]
            rate, slowest, median = (
                statistics.median(getattr(run, name) for run in runs) for name in ("per_second", "slowest_ms", "median_ms")
            )
            print(f"{'aligned' if aligned else 'spread':8} {depth:5} {rate:17,.0f} {median:9.2f} ms {slowest:10.2f} ms")
    print(f"full pool, 39 prompts wait: schedule() takes {full_pool(clock=clock):.3f} ms (median)")
    for common in (16_000, 8192, 0):
        found = burst(common, clock=clock)
        at = ", ".join(f"{seconds:.2f}" for seconds in found.first_tokens)
        print(f"burst of 1,000 prompts, {common:6,} tokens in common: slowest step {found.slowest_ms:.1f} ms, first tokens after {at} s")


if __name__ == "__main__":
    main()
