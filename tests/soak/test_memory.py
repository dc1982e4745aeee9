"""Memory does not grow with the number of requests served: engine, text side and a tokenizer, on FakeKV, as `LLM` joins them.

The quick test counts Python's memory blocks, which repeat exactly. The soak fits a line through the process's own memory
(anonymous pages, swapped ones included) over 100,000 requests.
"""

import gc
import random
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.policy import block_pool
from octavo.sampling_params import SamplingParams
from tests.support.serving import FakeService

BYTES_PER_REQUEST = 20  # a single forgotten object would be more


class Load:
    """Requests of all kinds, one after the other: hits and misses, samples, stop strings, clients that leave."""

    def __init__(self, service: FakeService) -> None:
        self.service = service
        self.rng = random.Random(11)
        self.shared = [[self.rng.randrange(3, 500) for _ in range(24)] for _ in range(40)]
        self.served = 0

    def serve(self, count: int) -> None:
        """That many more, until nothing is left."""
        end = self.served + count
        while self.served < end or self.service.core.has_work:
            while self.served < end and len(self.service.scheduler.waiting) < 4:
                self._add()
            if self.rng.random() < 0.05:
                self.service.drop(f"request {self.served - self.rng.randrange(1, 9)}")
            self.service.step()
        assert self.service.is_idle()

    def _add(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.shared)[: rng.randrange(1, 24)] + [rng.randrange(3, 500) for _ in range(3)]
        stop = rng.choice(((), ("a",), ("the", "no such text")))
        params = SamplingParams(n=rng.choice((1, 1, 2)), max_tokens=rng.randrange(1, 10), stop=stop)
        self.service.add(f"request {self.served}", prompt, params, salt=rng.choice(("", "tenant")))
        self.served += 1


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_kept_of_requests_that_have_ended(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "EVICTED_RING", 64)  # full at once; in the soak it fills while warming up
    load = Load(FakeService(num_blocks=32, depth=depth))
    load.serve(400)
    gc.collect()
    before = sys.getallocatedblocks()
    load.serve(800)
    gc.collect()
    assert sys.getallocatedblocks() - before < 100, "something of every eighth request is kept, or more"
    assert load.service.scheduler.stats.preemptions > 0 and load.service.pool.counts.evicted > 1000


@pytest.mark.soak
@pytest.mark.parametrize("depth", [1, 2])
def test_memory_stays_level_over_a_hundred_thousand_requests(depth: int, record_property: Callable[[str, object], None]) -> None:
    load = Load(FakeService(num_blocks=32, depth=depth))
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
