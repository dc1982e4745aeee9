"""The numbers of an engine by the names that Prometheus gets, and `Metric`, the form in which `LLM.get_metrics` returns them."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.messages import STEP_TOKENS, SchedulerStats

PREFIX = "octavo:"

GAUGES = {
    "num_requests_running": "Sequences in the steps of the engine.",
    "num_requests_waiting": "Sequences that wait for room.",
    "kv_cache_usage_perc": "Share of KV blocks in use; 1 is all.",
    "pinned_blocks": "KV blocks that pinned prefixes hold.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Of these, found.",
    "pinned_prefix_hits": "Requests that found a part of a pinned prefix.",
    "pinned_prefix_tokens": "Prompt tokens found there, which were not computed again.",
    "num_preemptions": "Sequences that had to give their blocks back.",
}
STATE_GAUGES = {  # these and STATE_COUNTERS: only of models with recurrent layers
    "state_slots": "State slots of recurrent layers.",
    "state_slots_in_use": "State slots that sequences and pinned prefixes hold.",
    "state_checkpoints": "States that prompts can continue from.",
}
STATE_COUNTERS = {
    "state_checkpoints_kept": "States that were kept for prompts to continue from.",
    "state_checkpoints_used": "Prompts that continued from one.",
    "state_checkpoints_evicted": "States that were evicted to make room.",
    "state_recomputed_tokens": "Prompt tokens whose blocks were found, but computed again, because no state was kept after them.",
}
STEPS = "iteration_tokens_total"


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number that goes up and down."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows."""

    name: str
    labels: dict[str, str]
    value: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many observations there were, their sum, and how many were at most as large as each bound; `+Inf` is the last."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


Metric = Gauge | Counter | Histogram


def numbers_of(stats: SchedulerStats) -> dict[str, float]:
    """Returns the value of each name in GAUGES and COUNTERS."""
    blocks = max(1, stats.num_blocks - 1)  # block 0 is the null block
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": (blocks - stats.free_blocks) / blocks if stats.num_blocks else 0.0,
        "pinned_blocks": stats.pinned_blocks,
        "pinned_prefix_hits": stats.pin_hits,
        "pinned_prefix_tokens": stats.pin_tokens,
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": stats.prefix_hits,
        "num_preemptions": stats.preemptions,
    }


def state_numbers_of(stats: SchedulerStats) -> dict[str, int]:
    """Returns the value of each name in STATE_GAUGES and STATE_COUNTERS."""
    return {
        "state_slots": stats.state_slots,
        "state_slots_in_use": stats.held_states,
        "state_checkpoints": stats.checkpoints,
        "state_checkpoints_kept": stats.checkpoints_kept,
        "state_checkpoints_used": stats.checkpoints_used,
        "state_checkpoints_evicted": stats.checkpoints_evicted,
        "state_recomputed_tokens": stats.stateless_tokens,
    }


def cumulated(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Returns the buckets for Prometheus, each with all smaller ones. `counts`: each bucket alone, the last without a bound."""
    buckets, below = [], 0.0
    for bound, count in zip([*map(float, bounds), float("inf")], counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
    return buckets


def engine_metrics(stats: SchedulerStats, prompt_tokens: int, model_name: str) -> list[Metric]:
    """Returns the numbers of the one engine that an `LLM` has. `prompt_tokens`: of all prompts, those found in the cache included"""
    labels = {"model_name": model_name, "engine": "0"}
    numbers = numbers_of(stats)
    counters = {name: int(numbers[name]) for name in COUNTERS}
    counters |= {"prompt_tokens": prompt_tokens, "generation_tokens": stats.generation_tokens}
    states = state_numbers_of(stats) if stats.state_slots else {}
    counters |= {name: number for name, number in states.items() if name in STATE_COUNTERS}
    buckets = {bound: int(count) for bound, count in cumulated(STEP_TOKENS, stats.steps)}
    return [
        *(Gauge(PREFIX + name, labels, numbers[name]) for name in GAUGES),
        *(Gauge(PREFIX + name, labels, number) for name, number in states.items() if name in STATE_GAUGES),
        *(Counter(PREFIX + name, labels, value) for name, value in counters.items()),
        Histogram(PREFIX + STEPS, labels, sum(stats.steps), stats.step_tokens, buckets),
    ]
