"""Ready means warm: one prefill, one decode step and two samples before the first request, so that it pays no one-time costs.

They run on a cache and a table of their own, thrown away after: no block, row, digest, count or arrival number of the engine
knows of them. A model that cannot run at all shows it here, before anybody is told that it is ready.
"""

from array import array

from octavo.config import Debug
from octavo.messages import NoiseKey, RowWrite, StepPlan
from octavo.policy.cache_spec import CacheGeometry, LayerCacheSpec
from octavo.sampling_params import SamplingParams
from octavo.worker.faults import Faults
from octavo.worker.kv_store import ContiguousStore, KVStore, PagedStore
from octavo.worker.model_runner import ModelRunner
from octavo.worker.program import Program
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import Sampling

PROMPT_TOKENS = 2


def warm_up(
    program: Program, sampling: Sampling, specs: list[LayerCacheSpec], geometry: CacheGeometry, paged: bool
) -> None:
    size, prompt = geometry.block_size, min(PROMPT_TOKENS, geometry.max_model_len - 1)
    blocks = -(-(prompt + 1) // size)
    store: KVStore
    if paged:
        store = PagedStore(specs, 1 + blocks, size)  # block 0 is the null block
    else:
        store = ContiguousStore(specs, 1, blocks * size)
    runner = ModelRunner(program, sampling, store, RequestTable(1, prompt + 2, blocks), size, Faults(Debug()))
    write = RowWrite(0, 0, array("q", [0] * prompt), prompt, 0, [[]], SamplingParams(), (), [], NoiseKey((0, 0), 0, 0), b"")
    new_blocks = [(0, 0, index, 1 + index) for index in range(blocks)]
    prefill = StepPlan(1, [0], [0], [0], [prompt], [True], new_blocks=new_blocks, row_writes=[write])
    decode = StepPlan(2, [0], [0], [prompt], [1], [True])
    for plan in (prefill, decode):
        runner.forward(plan)
        runner.sample()
