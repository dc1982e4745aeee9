"""Memory does not grow with the number of requests served, by an `LLM` on FakeKV.

The quick test counts Python's memory blocks, which repeat exactly. The soak fits a line through the process's own memory
(anonymous pages, swapped ones included) over 100,000 requests.
"""

import gc
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo import LLM
from octavo.messages import AddRequest
from octavo.outputs import RequestOutput, TextDelta
from octavo.policy import block_pool
from octavo.sampling_params import SamplingParams
from tests.support.story_folder import story_folder

BYTES_PER_REQUEST = 20  # a single forgotten object would be more


class NoReader:
    """Keeps nothing, so that whatever grows is the engine's."""

    def push(self, delta: TextDelta) -> None:
        pass

    def finish(self, output: RequestOutput) -> None:
        pass


class Load:
    """Requests of all kinds, one after the other: hits and misses, samples, stop strings, clients that leave."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core = llm._core
        self.rng = random.Random(11)
        self.shared = [[self.rng.randrange(3, 500) for _ in range(24)] for _ in range(40)]
        self.served = 0

    def serve(self, count: int) -> None:
        """That many more, until nothing is left."""
        end = self.served + count
        while self.served < end or self.core.has_work:
            while self.served < end and len(self.core.scheduler.waiting) < 4:
                self._add()
            if self.rng.random() < 0.05:
                self.llm._drop([f"request {self.served - self.rng.randrange(1, 9)}"])
            self.llm._pump()
        assert self.is_idle

    @property
    def is_idle(self) -> bool:
        outputs, scheduler = self.llm._outputs, self.core.scheduler
        nothing = not (outputs._requests or scheduler._planned or scheduler.kv.pending)
        return nothing and not any(scheduler.kv.pool.ref) and len(scheduler.rows.free) == scheduler.limits.max_num_seqs

    def _add(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.shared)[: rng.randrange(1, 24)] + [rng.randrange(3, 500) for _ in range(3)]
        stop = rng.choice(((), ("a",), ("the", "no such text")))
        params = SamplingParams(n=rng.choice((1, 1, 2)), max_tokens=rng.randrange(1, 10), stop=stop)
        request = AddRequest(f"request {self.served}", prompt, params, cache_salt=rng.choice(("", "tenant")))
        self.core.add(request)
        self.llm._outputs.add(request, None, NoReader())
        self.served += 1


@pytest.fixture(params=[1, 2])
def load(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """At both depths, in so few blocks that requests are preempted and blocks evicted."""
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=fake")
    sizes = {"num_gpu_blocks_override": 32, "block_size": 4, "max_model_len": 124, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with LLM(str(story_folder(tmp_path)), pipeline_depth=request.param, **sizes) as llm:
        yield Load(llm)


def test_nothing_is_kept_of_requests_that_have_ended(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "EVICTED_RING", 64)  # full at once; in the soak it fills while warming up
    load.serve(400)
    gc.collect()
    before = sys.getallocatedblocks()
    load.serve(800)
    gc.collect()
    assert sys.getallocatedblocks() - before < 100, "something of every eighth request is kept, or more"
    scheduler = load.core.scheduler
    assert scheduler.stats.preemptions > 0 and scheduler.kv.pool.counts.evicted > 1000


@pytest.mark.soak
def test_memory_stays_level_over_a_hundred_thousand_requests(load: Load, record_property: Callable[[str, object], None]) -> None:
    load.serve(10_000)
    served, used = [], []
    while load.served < 110_000:
        load.serve(2_000)
        gc.collect()
        served.append(load.served)
        used.append(_anonymous_bytes())
    slope = statistics.linear_regression(served, used).slope
    record_property("memory", f"{slope:+.2f} bytes a request, {used[0] / 2**20:.2f} MiB first and {used[-1] / 2**20:.2f} MiB last")
    assert slope < BYTES_PER_REQUEST


def _anonymous_bytes() -> int:
    """What the process has written and still holds, in memory or swapped out."""
    fields = dict(re.findall(r"^(RssAnon|VmSwap):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE))
    return 1024 * (int(fields["RssAnon"]) + int(fields["VmSwap"]))
