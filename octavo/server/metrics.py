"""Metrics for Prometheus: the server's counters (`Numbers`), and the numbers that engines report (`engine_families`).

Counters and histograms are plain numbers in one row of cells. Counting adds to a cell, which is cheap enough for every token. The
families for Prometheus are made on request. Several API processes have their rows side by side in one file that all of them map, so
that each of them can report the sums. The last cell of a row counts heartbeats, by which the first process sees that another one is
alive.

    counter      a cell for each value of its label
    histogram    a cell for each bucket, one for larger values, one for the sum
"""

import mmap
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from octavo import metrics
from octavo.messages import STEP_TOKENS, EngineFacts, HitReason, RankNumbers, SchedulerStats
from octavo.metrics import cumulated
from octavo.own_file import naming_tmpdir

FINISH_REASONS = ("stop", "length", "abort", "error")
HIT_REASONS = get_args(HitReason)
FAILURES = ("invalid_request", "overloaded", "queue_timeout", "deadline_exceeded", "engine_dead", "engine_lost", "numerical_error", "other")
STATUSES = ("200", "204", "400", "401", "403", "404", "405", "408", "413", "414", "415", "429", "431", "499", "500", "503", "504", "other")
SECONDS = tuple(float(f"{digits}e{power}") for power in range(-3, 3) for digits in ("1", "1.5", "2", "3", "5", "7.5")) + (1000.0,)
TOKENS = tuple(digits * 10**power for power in range(6) for digits in (1, 2, 5)) + (10**6,)

SILENT_SECONDS = 5.0  # a rank whose last beat is older is not up

Cells: TypeAlias = "array[float] | memoryview[float]"


class Counter:
    def __init__(self, name: str, help_text: str, label: str | None = None, values: Sequence[str] = ("",)) -> None:
        self.name, self.help_text = name, help_text
        self.size = len(values)
        self._label = label
        self._values = values
        self._places = {value: place for place, value in enumerate(values)}

    def place(self, cells: Cells, start: int) -> None:
        self._cells, self.start = cells, start
        self._places = {value: start + place for place, value in enumerate(self._values)}

    def add(self, amount: float = 1, value: str = "") -> None:
        self._cells[self._places[value]] += amount

    def family(self, prefix: str, labels: Mapping[str, str], totals: Sequence[float]) -> Metric:
        names = [*labels, self._label] if self._label else [*labels]
        family = CounterMetricFamily(prefix + self.name, self.help_text, labels=names)
        for value, place in self._places.items():
            family.add_metric([*labels.values(), value] if self._label else [*labels.values()], totals[place])
        return family


class Histogram:
    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name, self.help_text = name, help_text
        self.size = len(bounds) + 2
        self._bounds = bounds

    def place(self, cells: Cells, start: int) -> None:
        self._cells = cells
        self._start, self._sum = start, start + self.size - 1

    def observe(self, value: float, times: int = 1) -> None:
        cells = self._cells
        cells[self._start + bisect_left(self._bounds, value)] += times
        cells[self._sum] += value * times

    def family(self, prefix: str, labels: Mapping[str, str], totals: Sequence[float]) -> Metric:
        family = HistogramMetricFamily(prefix + self.name, self.help_text, labels=[*labels])
        family.add_metric([*labels.values()], cumulated(self._bounds, totals[self._start : self._sum]), totals[self._sum])
        return family


class Numbers:
    """Everything that an API process counts. `shared`: a file with a row for each of `num_processes`; this process has row `row`."""

    def __init__(self, shared: int | None = None, row: int = 0, num_processes: int = 1) -> None:
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts, those found in the cache included.")
        self.generation_tokens = Counter("generation_tokens", "Tokens of answers.")
        self.request_success = Counter("request_success", "Answers by how they ended.", "finished_reason", FINISH_REASONS)
        self.prefix_lookups = Counter("prefix_cache_lookups", "Prompts by why their prefix was found or not.", "hit_reason", HIT_REASONS)
        self.request_failures = Counter("request_failures", "Requests that were refused or failed on their way.", "reason", FAILURES)
        self.http_responses = Counter("http_responses", "Answers by HTTP status.", "status", STATUSES)
        self.time_to_first_token = Histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS)
        self.inter_token_latency = Histogram("inter_token_latency_seconds", "From one token of an answer to the next.", SECONDS)
        self.e2e_latency = Histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", SECONDS)
        self.queue_time = Histogram("request_queue_time_seconds", "Waiting to be scheduled.", SECONDS)
        self.prefill_time = Histogram("request_prefill_time_seconds", "From there to the first token.", SECONDS)
        self.decode_time = Histogram("request_decode_time_seconds", "From there to the last one.", SECONDS)
        self.request_prompt_tokens = Histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.request_generation_tokens = Histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.restarts_asked = Counter("rolling_restarts_asked", "How often an admin asked to have all engines replaced.")
        self.restarts_done = Counter("rolling_restarts_done", "How often all engines were replaced.")
        self.loop_lag = Histogram("event_loop_lag_seconds", "How late the API process got to a task that was due.", SECONDS)
        self._members: list[Counter | Histogram] = [*vars(self).values()]
        self.shared = shared
        size = sum(member.size for member in self._members) + 1
        if shared is None:
            self._rows: list[Cells] = [array("d", bytes(8 * size))]
        else:
            self._rows = _shared_rows(shared, num_processes, size)
        self._row = self._rows[row]
        start = 0
        for member in self._members:
            member.place(self._row, start)
            start += member.size

    def beat(self) -> None:
        """Shows the other processes that this one is alive."""
        self._row[-1] += 1

    def beats(self, row: int) -> float:
        """Returns how often the process with this row has called `beat`."""
        return self._rows[row][-1]

    def total(self, counter: Counter) -> float:
        """Returns the sum of a counter without a label over all processes."""
        return sum(row[counter.start] for row in self._rows)

    def families(self, prefix: str, labels: Mapping[str, str]) -> list[Metric]:
        """Returns the sums over all processes."""
        totals = [sum(column) for column in zip(*self._rows, strict=True)]
        return [member.family(prefix, labels, totals) for member in self._members]


def shared_file() -> int:
    """Returns the descriptor of a file for `Numbers`. Other processes inherit it; the file has no name and ends with the last of them."""
    with naming_tmpdir():
        descriptor, path = tempfile.mkstemp(prefix="octavo-numbers-")
        os.unlink(path)
    return descriptor


def _shared_rows(descriptor: int, num_rows: int, size: int) -> list[Cells]:
    """Maps the file, and fills it if it is empty. A process that is started again goes on with its row."""
    num_bytes = num_rows * size * 8
    if not os.fstat(descriptor).st_size:
        with naming_tmpdir(), open(descriptor, "wb", closefd=False) as file:
            file.write(bytes(num_bytes))  # a full disk raises an error here, and would be a signal later
    cells = memoryview(mmap.mmap(descriptor, num_bytes)).cast("d")
    return [cells[row * size : (row + 1) * size] for row in range(num_rows)]


class Engine(Protocol):
    """The part of an engine that metrics read."""

    @property
    def number(self) -> int: ...

    @property
    def state(self) -> str: ...

    @property
    def stats(self) -> SchedulerStats:
        """The numbers of the engine. They continue after a restart."""

    @property
    def facts(self) -> EngineFacts | None:
        """Set once it was ready."""

    @property
    def ranks(self) -> list[RankNumbers]: ...


def engine_families(prefix: str, labels: Mapping[str, str], engines: Sequence[Engine]) -> Iterator[Metric]:
    """Yields the gauges and counters of engines, and of the ranks of each."""
    names = [*labels, "engine"]
    found = [([*labels.values(), str(engine.number)], _numbers_of(engine)) for engine in engines]
    yield from _families(prefix, names, GAUGES, COUNTERS, found)
    states = [(own, metrics.state_numbers_of(engine.stats)) for (own, _), engine in zip(found, engines) if engine.stats.state_slots]
    if states:
        yield from _families(prefix, names, metrics.STATE_GAUGES, metrics.STATE_COUNTERS, states)
    steps = HistogramMetricFamily(prefix + metrics.STEPS, "Tokens that a step computed.", labels=names)
    for (own, _), engine in zip(found, engines):
        steps.add_metric(own, cumulated(STEP_TOKENS, engine.stats.steps), engine.stats.step_tokens)
    yield steps
    yield from _rank_families(prefix, labels, [engine for engine in engines if engine.facts is not None and engine.facts.ranks])


def _families(
    prefix: str, names: list[str], gauges: Mapping[str, str], counters: Mapping[str, str],
    found: Sequence[tuple[list[str], Mapping[str, float]]],
) -> Iterator[Metric]:  # fmt: skip
    """`found`: the labels and the numbers of each engine"""
    for family, texts in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, text in texts.items():
            metric = family(prefix + name, text, labels=names)
            for own, numbers in found:
                metric.add_metric(own, numbers[name])
            yield metric


GAUGES = {**metrics.GAUGES, "engine_ready": "1 while requests are served."}
COUNTERS = {**metrics.COUNTERS, "engine_restarts": "Engines that died and were replaced."}


def _numbers_of(engine: Engine) -> dict[str, float]:
    restarts = 0 if engine.facts is None else engine.facts.epoch - 1
    return {**metrics.numbers_of(engine.stats), "engine_ready": int(engine.state == "ready"), "engine_restarts": restarts}


def _rank_families(prefix: str, labels: Mapping[str, str], engines: Sequence[Engine]) -> Iterator[Metric]:
    """Yields the numbers of each rank, if a model is split over several."""
    if not engines:
        return
    names = [*labels, "engine", "rank", "stage"]
    up = GaugeMetricFamily(f"{prefix}rank_up", "1 while the rank gives signs of life.", labels=names)
    steps = CounterMetricFamily(f"{prefix}rank_steps", "Steps that the rank has made.", labels=names)
    help_text = "Time that the rank was in steps: it computed, or waited for other ranks."
    seconds = CounterMetricFamily(f"{prefix}rank_in_step_seconds", help_text, labels=names)
    for engine in engines:
        assert engine.facts is not None
        for one, done in zip(engine.facts.ranks, engine.ranks):
            own = [*labels.values(), str(engine.number), str(one.rank), str(one.stage)]
            up.add_metric(own, int(engine.state == "ready" and done.age < SILENT_SECONDS))
            steps.add_metric(own, done.steps)
            seconds.add_metric(own, done.seconds)
    yield from (up, steps, seconds)
