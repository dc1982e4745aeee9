"""Compares policies of routing without a model: `python bench/routing.py [--trace FILE]`.

Engines are real: scheduler, pool and step loop. The runner makes up tokens, and time is counted, not measured. A step takes a fixed
time, in which weights are read, and more for each token that it computes; attention is taken to be free. The numbers are about those
of a model with 8 billion weights on a large GPU.

    one       one engine with the blocks, the rows and the speed of all the others together: what routing cannot beat
    prefix, least, turns       engines behind a door that routes

The door hears of caches and tokens at the end of each step. The hit rate is the share of prompt tokens that were found in a cache.
"""

import argparse
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import Random
from typing import Literal

from octavo.bench.traces import HASHED, Traced, read_trace
from octavo.engine.core import EngineCore
from octavo.engine.routing import CacheUpdates, Routing
from octavo.messages import AddRequest, CacheChange, Delta, Limits, StepPlan, StepResult
from octavo.policy.block_pool import BlockPool
from octavo.policy.kv_manager import KVManager
from octavo.policy.prefix_matcher import Digests
from octavo.policy.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.worker.executor import Kept, Masks, Promise

KEY, IDENTITY, VOCAB = b"bench", b"bench", 1 << 16
POLICIES: tuple["Way", ...] = ("one", "prefix", "least", "turns")
Way = Literal["one", "prefix", "least", "turns"]


@dataclass(frozen=True, slots=True)
class Ask:
    at: float  # simulated ms
    prompt: Callable[[], "array[int]"]  # made when it is sent: all together would take gigabytes
    to_come: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What one engine runs on."""

    num_blocks: int
    block_size: int = 16
    rows: int = 64
    budget: int = 2048  # tokens of a step
    step_ms: float = 8.0
    token_ms: float = 0.05

    def times(self, count: int) -> "Machine":
        """Returns a machine that is so many times as large and as quick."""
        return replace(
            self, num_blocks=self.num_blocks * count, rows=self.rows * count, budget=self.budget * count, token_ms=self.token_ms / count
        )


@dataclass(slots=True)
class Figures:
    prompt_tokens: int = 0
    hits: int = 0
    first_ms: list[float] = field(default_factory=list)  # time to first token
    reasons: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.prompt_tokens

    def first(self, share: float) -> float:
        ordered = sorted(self.first_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class MadeUp:
    """A runner that computes nothing."""

    def forward(self, plan: StepPlan) -> None:
        self.plan = plan

    def sample(self, masks: Masks | None = None) -> Promise:
        plan = self.plan
        return Kept(StepResult(plan.step, [[(17 * seq_id + plan.step) % VOCAB] if samples else [] for seq_id, samples in _entries(plan)]))

    def stop(self) -> None:
        pass


def _entries(plan: StepPlan) -> Iterator[tuple[int, bool]]:
    return zip(plan.seq_id, plan.outputs)


class Engine:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.kv = KVManager(BlockPool(machine.num_blocks), machine.block_size, caching=True, key=KEY, identity=IDENTITY)
        longest = (machine.num_blocks - 1) * machine.block_size
        limits = Limits(machine.rows, machine.budget, longest, VOCAB, machine.num_blocks, machine.block_size)
        self.core = EngineCore(Scheduler(self.kv, limits), MadeUp(), depth=1)
        self.updates = CacheUpdates(self.kv.pool)
        self.busy = False

    def step(self) -> tuple[float, list[Delta], CacheChange | None]:
        """Returns how long a step takes, and what it brings."""
        before = self.core.scheduler.stats.step_tokens
        deltas = self.core.step()
        tokens = self.core.scheduler.stats.step_tokens - before
        return self.machine.step_ms + tokens * self.machine.token_ms, deltas, self.updates.take()


class Simulation:
    """Requests arrive, steps end: whatever is next happens next."""

    def __init__(self, way: Way, num_engines: int, machine: Machine) -> None:
        count, machine = (1, machine.times(num_engines)) if way == "one" else (num_engines, machine)
        self.engines = [Engine(machine) for _ in range(count)]
        self.routing = Routing("prefix" if way == "one" else way, count, machine.block_size)
        self.digests = Digests(KEY, IDENTITY)
        self.figures = Figures()
        self.began: dict[str, float] = {}  # requests without a token
        self.ends: list[tuple[float, int, list[Delta], CacheChange | None]] = []  # steps under way, a heap

    def run(self, asks: Sequence[Ask]) -> Figures:
        for number, ask in enumerate(asks):
            while self.ends and self.ends[0][0] <= ask.at:
                self._end_step()
            self._arrive(str(number), ask)
        while self.ends:
            self._end_step()
        for engine in self.engines:
            assert not engine.core.has_work
            stats = engine.core.scheduler.stats
            self.figures.prompt_tokens += stats.prefix_queries
            self.figures.hits += stats.prefix_hits
            self.figures.preemptions += stats.preemptions
        return self.figures

    def _arrive(self, name: str, ask: Ask) -> None:
        prompt = ask.prompt()
        digests = self.digests.of_prompt(AddRequest(name, prompt, SamplingParams()), self.routing.block_size)
        choice = self.routing.choose(digests, len(prompt), range(len(self.engines)))
        self.routing.begin(name, choice, digests, len(prompt), ask.to_come)
        self.figures.reasons[choice.reason] += 1
        self.began[name] = ask.at
        params = SamplingParams(max_tokens=ask.to_come, ignore_eos=True)
        self.engines[choice.engine].core.add(AddRequest(name, list(prompt), params))
        self._begin_step(choice.engine, ask.at)

    def _begin_step(self, number: int, now: float) -> None:
        engine = self.engines[number]
        if engine.busy or not engine.core.has_work:
            return
        engine.busy = True
        took, deltas, change = engine.step()
        heappush(self.ends, (now + took, number, deltas, change))

    def _end_step(self) -> None:
        now, number, deltas, change = heappop(self.ends)
        self.engines[number].busy = False
        if change is not None:
            self.routing.learn(number, change)
        for delta in deltas:
            self.routing.came(delta.request_id, len(delta.token_ids))
            if delta.request_id in self.began:
                self.figures.first_ms.append(now - self.began.pop(delta.request_id))
            if delta.finish_reason is not None:
                self.routing.done(delta.request_id)
        self._begin_step(number, now)


# --- loads -----------------------------------------------------------------------------------------------------------


def prefixes(count: int, length: int, requests: int, gap_ms: float, seed: int = 0, own: int = 128, to_come: int = 64) -> list[Ask]:
    """Returns requests that begin with one of `count` long prefixes, drawn at random, and end with words of their own."""
    random = Random(seed)
    texts = [array("i", (random.randrange(VOCAB) for _ in range(length))) for _ in range(count)]
    asks, at = [], 0.0
    for _ in range(requests):
        at += random.expovariate(1 / gap_ms)
        prompt = random.choice(texts) + array("i", (random.randrange(VOCAB) for _ in range(own)))
        asks.append(Ask(at, lambda prompt=prompt: prompt, to_come))  # type: ignore[misc]
    return asks


def third(count: int, length: int, num_engines: int, block_size: int = 16, slack: float = 1.3) -> int:
    """Returns the blocks of an engine that holds its share of all prefixes, rounded up to whole ones, and has some to work with."""
    return round(-(-count // num_engines) * length / block_size * slack) + 1


def of_trace(requests: Sequence[Traced], quicker: float = 1.0) -> list[Ask]:
    """Returns the requests of a trace. Equal hash ids become equal tokens. `quicker`: they arrive so many times as quickly."""
    first = requests[0].arrival or 0.0
    return [
        Ask(1000 * ((each.arrival or 0.0) - first) / quicker, lambda each=each: _traced_ids(each), each.output_length)  # type: ignore[misc]
        for each in requests
    ]


def _traced_ids(request: Traced) -> "array[int]":
    ids = array("i")
    for one in request.hash_ids:
        ids.extend(array("i", [one % VOCAB, one // VOCAB]) * (HASHED // 2))
    return ids[: request.input_length]


def compare(title: str, asks: Sequence[Ask], num_engines: int, machine: Machine) -> None:
    tokens = (machine.num_blocks - 1) * machine.block_size
    print(f"\n{title}\n{len(asks):,} requests over {num_engines} engines, {tokens:,} tokens in each cache")
    print(f"{'policy':8} {'hit rate':>9} {'of one':>7} {'first token':>12} {'p90':>9} {'mean':>9}   reasons")
    best = 0.0
    for way in POLICIES:
        figures = Simulation(way, num_engines, machine).run(asks)
        best = best or figures.hit_rate
        reasons = " ".join(f"{reason} {count}" for reason, count in figures.reasons.most_common())
        times = [f"{ms:6,.0f} ms" for ms in (figures.first(0.5), figures.first(0.9), statistics.mean(figures.first_ms))]
        print(f"{way:8} {figures.hit_rate:9.1%} {figures.hit_rate / best:7.1%} {times[0]:>12} {times[1]:>9} {times[2]:>9}   {reasons}")


def main() -> None:
    parser = argparse.ArgumentParser(description="hit rate and time to first token by policy, simulated")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000, help="of the load with eight prefixes")
    parser.add_argument("--gap", type=float, default=50.0, help="mean ms between two of them")
    parser.add_argument("--trace", help="Mooncake JSONL")
    parser.add_argument("--trace-requests", type=int, default=1500)
    parser.add_argument("--trace-cache", type=int, default=2_000_000, help="tokens in the cache of each engine")
    parser.add_argument("--quicker", type=float, default=1.0, help="times as quickly as in the trace")
    options = parser.parse_args()
    count, length = 8, 4096
    asks = prefixes(count, length, options.requests, options.gap)
    compare(f"{count} prefixes of {length} tokens", asks, options.engines, Machine(third(count, length, options.engines)))
    if options.trace:
        machine = Machine(options.trace_cache // HASHED + 1, HASHED)
        asks = of_trace(read_trace(options.trace, options.trace_requests), options.quicker)
        compare(f"trace, {options.quicker:g} times as quickly", asks, options.engines, machine)


if __name__ == "__main__":
    main()
