"""Measures a workload. After a warm-up, each round is one `generate` call over all requests, with an empty prefix cache.

A request's times come from its life record:

    queued ---- first scheduled ---- first token ---- ... ---- finished
      |  queue        |                   |  / (tokens - 1): per output token
      |  first token -------------------- |                        |
      |  end to end ---------------------------------------------- |
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.bench.figures import Figure, Result
from octavo.bench.machine import peak_memory
from octavo.bench.workload import Workload
from octavo.errors import EngineError
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 64
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Round:
    seconds: float
    outputs: list[RequestOutput]
    first_token_alone: float | None = None  # seconds to generate only the first token, if the workload is a single request


def run_round(llm: LLM, workload: Workload, temperature: float = 0.0) -> Round:
    """Runs the whole workload in one call, with an empty prefix cache."""
    llm.reset_prefix_cache()
    params = [
        SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=workload.is_text)
        for _, count in workload.requests
    ]
    start = time.perf_counter()
    outputs = llm.generate([ids for ids, _ in workload.requests], params)
    seconds = time.perf_counter() - start
    for output, (_, count) in zip(outputs, workload.requests, strict=True):
        sample = output.outputs[0]
        if len(sample.token_ids) != count:
            raise EngineError(f"{workload.name}: a request ended after {len(sample.token_ids)} of {count} tokens ({sample.stop_reason})")
    return Round(seconds, outputs)


def warm_up(llm: LLM, workload: Workload) -> None:
    """Runs a small part of the workload, so that what is made on first use is not measured."""
    few = [(ids[:WARM_UP_TOKENS], min(count, 4)) for ids, count in workload.requests[:WARM_UP_REQUESTS]]
    run_round(llm, replace(workload, requests=few))


def measure(llm: LLM, workload: Workload, rounds: int, temperature: float = 0.0) -> Result:
    """Warms up, runs the rounds, and returns their figures."""
    say(f"{workload.name}: warm-up")
    warm_up(llm, workload)
    done = []
    for number in range(1, rounds + 1):
        done.append(_round(llm, workload, temperature))
        say(f"{workload.name}: round {number} of {rounds}, {done[-1].seconds:.2f} s")
    facts = {
        "requests": len(workload.requests),
        "input_tokens": workload.input_tokens,
        "output_tokens": workload.output_tokens,
        "clipped": workload.clipped,
        "rounds": rounds,
    }
    return Result(workload.name, facts, figures_of(workload, done))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _round(llm: LLM, workload: Workload, temperature: float) -> Round:
    done = run_round(llm, workload, temperature)
    (ids, count), *others = workload.requests
    if others or count == 1:
        return done
    alone = run_round(llm, replace(workload, requests=[(ids, 1)]), temperature)
    return replace(done, first_token_alone=alone.seconds)


def figures_of(workload: Workload, rounds: list[Round]) -> dict[str, Figure]:
    """Returns the figures of all rounds. Throughput has a sample per round, times have one per request and round."""

    def each_round(unit: str, of: Callable[[Round], float]) -> Figure:
        return Figure(unit, [of(one) for one in rounds])

    figures = {
        "output_throughput": each_round("tokens/s", lambda one: workload.output_tokens / one.seconds),
        "input_throughput": each_round("tokens/s", lambda one: workload.input_tokens / one.seconds),
        "request_throughput": each_round("requests/s", lambda one: len(workload.requests) / one.seconds),
        "wall": each_round("s", lambda one: one.seconds),
        "running_at_once": each_round("requests", _running),
        "cache_hit_rate": each_round("%", lambda one: 100 * sum(o.num_cached_tokens for o in one.outputs) / workload.input_tokens),
        "preemptions": each_round("", lambda one: sum(output.metrics.preemptions for output in one.outputs)),
    }
    if rates := _decode_rates(workload, rounds):
        figures["decode_throughput"] = Figure("tokens/s", rates)
    figures |= _times([output for one in rounds for output in one.outputs])
    return figures | {"peak_memory": Figure("MiB", [peak_memory() / MIB])}


def _running(one: Round) -> float:
    """Returns how many requests ran at the same time, on average over the round."""
    return sum(_between(output.metrics.first_scheduled, output.metrics.finished) for output in one.outputs) / one.seconds


def _decode_rates(workload: Workload, rounds: list[Round]) -> list[float]:
    """Returns tokens per second after the first token, for a single request. Rounds too short to tell are left out."""
    alone = [(one.seconds, one.first_token_alone) for one in rounds if one.first_token_alone is not None]
    return [(workload.output_tokens - 1) / (seconds - first) for seconds, first in alone if seconds > first]


def _times(outputs: list[RequestOutput]) -> dict[str, Figure]:
    lives = [(output.metrics, len(output.outputs[0].token_ids)) for output in outputs]
    times = {
        "queue": [_between(life.queued, life.first_scheduled) for life, _ in lives],
        "first_token": [_between(life.queued, life.first_token) for life, _ in lives],
        "per_output_token": [_between(life.first_token, life.finished) / (count - 1) for life, count in lives if count > 1],
        "end_to_end": [_between(life.queued, life.finished) for life, _ in lives],
    }
    return {name: Figure("ms", [1000 * second for second in seconds]) for name, seconds in times.items() if seconds}


def _between(start: float | None, end: float | None) -> float:
    if start is None or end is None:
        raise EngineError("a request ended without having been served")
    return end - start
