"""The pool is reserved, not touched: a large one costs nothing until blocks or state slots of it are written."""

import subprocess
import sys

from tests.cli.processes import ROOT, environment

# In a process of its own: what others leave behind must not be given back while it measures.
MEASURED = """
import os
from pathlib import Path
from octavo.messages import StepPlan
from octavo.policy.cache_spec import Buffer, LayerCacheSpec
from octavo.worker.kv_store import PagedStore, poison

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

token = {"k": Buffer((8, 128), "bfloat16"), "v": Buffer((8, 128), "bfloat16")}
specs = [LayerCacheSpec(layer, token, state={"recurrent": Buffer((16, 128, 128), "float32")}) for layer in range(4)]
before = resident()
store = PagedStore(specs, num_blocks=4096, block_size=16, num_states=256)
print(sum(buffer.nbytes for cache in store.caches + store.states for buffer in cache.values()) / 2**20, resident() - before)
for block in range(512):
    poison(store.caches, block)
print(resident() - before)
store.apply(StepPlan(1, copies=[(1, 4000)]))
print(resident() - before)
"""


# promise: cpu-pool-reserved
def test_memory_is_taken_when_blocks_are_written_and_not_before() -> None:
    run = subprocess.run([sys.executable, "-c", MEASURED], cwd=ROOT, env=environment({}), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    size, reserved, written, copied = map(float, run.stdout.split())
    assert size == 2 * 1024 and reserved < 32
    assert 100 < written <= copied < 200, "512 of 4,096 blocks are an eighth"
