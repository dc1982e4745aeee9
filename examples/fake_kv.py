"""A busy engine on FakeKV, watched token by token: the first thing that goes wrong is printed, with where it lay in memory.

FakeKV is a model without weights: a slot of the cache holds a hash of everything before it, and the next token hashes every
slot read through the block table. So each text is known beforehand, and any mistake in paging changes it. The schedule has
shared prefixes, several samples a prompt, chunked prompts, a pool that is too small, preemptions, aborts and priorities.
`docs/exercises.md` plants mistakes to be found with it.
"""

import argparse
import logging
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from octavo.config import Debug
from octavo.engine.core import EngineCore
from octavo.messages import AddRequest, Delta, StepPlan
from octavo.policy import invariants
from octavo.policy.block_pool import BlockPool
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.kv_manager import KVManager
from octavo.policy.request import Limits
from octavo.policy.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.worker.fake_runner import FakeRunner, expected
from octavo.worker.faults import Faults

VOCAB, END_ID = 50, 3
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 30, 90
ROWS, BUDGET = 6, 16
REQUESTS, MOST_STEPS = 160, 5000


class Wrong(Exception):
    """What was found."""


@dataclass
class Sample:
    """What one sample should say, and what it has said so far."""

    num_prompt: int
    whole: list[int]
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)  # as last seen
    ended: bool = False


class NotingRunner(FakeRunner):
    """Has the tables noted when a plan is carried out."""

    def __init__(self, note: Callable[[], None], nan_step: int) -> None:
        super().__init__(CacheGeometry(NUM_BLOCKS, BLOCK_SIZE, MAX_LEN, 1), VOCAB, Faults(Debug(forward_nan=nan_step)))
        self._note = note

    def forward(self, plan: StepPlan) -> None:
        self._note()
        super().forward(plan)


class WatchedEngine:
    def __init__(self, depth: int, nan_step: int) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        kv = KVManager(self.pool, BLOCK_SIZE, caching=True, key=b"key", identity=b"FakeKV")
        limits = Limits(ROWS, BUDGET, MAX_LEN, VOCAB, NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(kv, limits, by_priority=True, end_ids=(END_ID,), preempt_every=9)
        self.core = EngineCore(self.scheduler, NotingRunner(self._note_tables, nan_step), depth)
        self.samples: dict[tuple[str, int], Sample] = {}
        self.not_finite: set[str] = set()  # requests

    def add(self, message: AddRequest) -> None:
        self.core.add(message)
        request = self.scheduler.requests[message.request_id]
        prompt, params = message.prompt_token_ids, message.params
        for index in range(params.n):
            whole = expected(prompt, params.max_tokens or 0, request.root, request.noise(index), VOCAB, request.end_ids, params.min_tokens)
            if END_ID in whole:
                whole = whole[: whole.index(END_ID) + 1]
            self.samples[message.request_id, index] = Sample(len(prompt), whole)

    def abort(self, name: str) -> None:
        for delta in self.core.abort(name):
            self._compare(delta)

    def step(self, check: bool) -> None:
        try:
            deltas = self.core.step()
            if check:
                invariants.check(self.scheduler)
        except Exception as error:
            raise Wrong(f"the step broke: {type(error).__name__}: {error}") from error
        for delta in deltas:
            self._compare(delta)

    def _note_tables(self) -> None:
        for seq in self.scheduler.running:
            self.samples[seq.request.request_id, seq.index].table = list(seq.tables[0])

    def _compare(self, delta: Delta) -> None:
        sample = self.samples[delta.request_id, delta.index]
        name = f"request {delta.request_id}, sample {delta.index}"
        if sample.ended:
            raise Wrong(f"{name} has ended, and yet there is news of it: {delta}")
        if delta.error is not None:
            self.not_finite |= {delta.request_id} if "numerical_error" in delta.error else set()
            if self.not_finite != {delta.request_id}:  # at most one row is poisoned
                raise Wrong(f"{name} ended with an error: {delta.error}")
        for token in delta.token_ids:
            sample.tokens.append(token)
            if sample.tokens != sample.whole[: len(sample.tokens)]:
                raise Wrong(f"{name} says something else\n{self._where(sample)}")
        sample.ended = delta.finish_reason is not None
        if delta.finish_reason in ("stop", "length") and len(sample.tokens) < len(sample.whole):
            raise Wrong(f"{name} ended after {len(sample.tokens)} of {len(sample.whole)} tokens")

    def _where(self, sample: Sample) -> str:
        """The wrong token beside the right one, and the block it was sampled after."""
        last = len(sample.tokens) - 1
        position = sample.num_prompt + last - 1
        index = position // BLOCK_SIZE
        sharing = [seq for seq in self.scheduler.running if set(seq.tables[0]) & set(sample.table)]
        holders = ", ".join(f"{seq.request.request_id}/{seq.index}" for seq in sharing)
        return (
            f"  expected   {' '.join(map(str, sample.whole[: last + 1]))}\n"
            f"  got        {' '.join(map(str, sample.tokens))}\n"
            f"  sampled after position {position}: entry {index} of its block table, offset {position % BLOCK_SIZE}\n"
            f"  its table  {sample.table}; blocks of it are now held by: {holders or 'nobody'}"
        )

    def check_idle(self) -> None:
        rows, blocks = ROWS - len(self.scheduler.rows.free), NUM_BLOCKS - 1 - self.pool.num_free
        if rows or blocks:
            raise Wrong(f"all have ended, and yet {rows} rows and {blocks} blocks are held")


def requests(rng: random.Random) -> Iterator[AddRequest]:
    """Prompts that begin alike, of every length around a block edge; some for several samples, some urgent, some of a tenant."""
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    for number in range(REQUESTS):
        prompt = shared[: rng.randrange(1, 40)] + [rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 4, 11)))]
        least = rng.choice((0, 0, 6))
        params = SamplingParams(n=rng.choice((1, 1, 1, 2, 4)), max_tokens=rng.randrange(max(1, least), 40), min_tokens=least, seed=number)
        yield AddRequest(f"r{number}", prompt, params, rng.choice((0, 0, 1, -1)), rng.choice(("", "", "", "tenant")))


def watch(seed: int, depth: int, nan_step: int, check: bool) -> str:
    rng = random.Random(seed)
    engine, to_come = WatchedEngine(depth, nan_step), requests(rng)
    coming = True
    while coming or engine.core.has_work:
        try:
            for _ in range(rng.choice((0, 0, 0, 1, 2))):
                message = next(to_come, None)
                coming = coming and message is not None
                if message is not None:
                    engine.add(message)
            if coming and engine.scheduler.requests and rng.random() < 0.05:
                engine.abort(rng.choice(list(engine.scheduler.requests)))
            engine.step(check)
            if engine.scheduler.step > MOST_STEPS:
                raise Wrong(f"nothing ends: {len(engine.scheduler.running)} run, {len(engine.scheduler.waiting)} wait")
        except Wrong as wrong:
            raise Wrong(f"depth {depth}, step {engine.scheduler.step}: {wrong}") from wrong
    engine.check_idle()
    stats, counts = engine.scheduler.snapshot(), engine.pool.counts
    return (
        f"depth {depth}: {REQUESTS} requests in {engine.scheduler.step} steps, {stats.generation_tokens} tokens, all as expected; "
        f"{stats.prefix_hits} prompt tokens found, {counts.evicted} blocks evicted, {stats.preemptions} preemptions"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="a busy engine on FakeKV, watched token by token")
    parser.add_argument("--seed", type=int, default=1, help="another schedule")
    parser.add_argument("--depth", type=int, choices=(1, 2), help="pipeline depth (default: first 1, then 2)")
    parser.add_argument("--nan", type=int, default=0, metavar="STEP", help="the first row of this step comes out not finite")
    parser.add_argument("--check", action="store_true", help="check the engine's own invariants after every step")
    args = parser.parse_args()
    logging.disable(logging.ERROR)  # a failed step is told below
    try:
        for depth in (1, 2) if args.depth is None else (args.depth,):
            print(watch(args.seed, depth, args.nan, args.check))
    except Wrong as wrong:
        print(wrong)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
