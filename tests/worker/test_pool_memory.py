"""The pool is reserved, not touched: a large one costs nothing until blocks of it are written."""

import os
from pathlib import Path

from octavo.messages import StepPlan
from octavo.policy.cache_spec import Buffer, LayerCacheSpec
from octavo.worker.kv_store import PagedStore, poison

MIB = 2**20
SPECS = [LayerCacheSpec(layer, {"k": Buffer((8, 128), "bfloat16"), "v": Buffer((8, 128), "bfloat16")}) for layer in range(4)]


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def test_memory_is_taken_when_blocks_are_written_and_not_before() -> None:
    before = resident()
    store = PagedStore(SPECS, num_blocks=4096, block_size=16)
    assert sum(buffer.nbytes for cache in store.caches for buffer in cache.values()) == 1024 * MIB
    assert resident() - before < 32
    for block in range(512):
        poison(store.caches, block)
    assert resident() - before > 100, "the measure does not see memory that is used"
    store.apply(StepPlan(1, copies=[(1, 4000)]))
    assert resident() - before < 200
