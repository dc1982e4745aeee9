"""Attention backend `flashinfer` beside `triton` on a GPU: `python bench/flashinfer_backend.py [--only NAME]`.

Every case first compares both with the reference kernel in float32, then times them. The columns, in microseconds:

    in a graph    attention alone: kernels replayed from a CUDA graph whose plan is fixed
    a step        index work of a step (`prepare`) and one layer, kernel by kernel, until the device is done
    host          index work alone, until the host can go on

The last part captures FlashInfer's decode wrapper once and replays it after a plan for other lengths: what a backend with graphs would do.
FlashInfer compiles its kernels when they are first used. `--only 64` limits that to one head size.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import flashinfer
import torch
from torch import Tensor

from bench.gpu_kernels import DEVICE, ON_GPU, distance, microseconds
from bench.gpu_prefill import Case, Mix
from octavo.attention.backend import AttentionBackend, load_backend
from octavo.attention.flashinfer import WORKSPACE
from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.kernels.reference import attention as plain

ROUNDS = 50 if ON_GPU else 2
WORST = 1e-2  # relative error in bfloat16
LONG = 2048 if ON_GPU else 64
NAMES = ("triton", "flashinfer")

MIXES: dict[str, Mix] = {
    "decode, 1 row": [(1, LONG)],
    "decode, 64 rows": [(1, LONG - 7 * row) for row in range(64 if ON_GPU else 4)],
    "prefill, 4 prompts": [(LONG, LONG)] * 4,
    "chunks and decode": [(LONG // 2, LONG), *[(1, LONG // 2 + row) for row in range(32 if ON_GPU else 3)], (LONG // 4, LONG // 4)],
}
SHAPES = {"64": (32, 8, 64), "128": (32, 8, 128)}  # heads, KV heads, numbers of a head


def batch_of(case: Case) -> ForwardBatch:
    rows, tokens = torch.arange(len(case.mix), device=DEVICE), torch.zeros(len(case.q), dtype=torch.int64, device=DEVICE)
    return ForwardBatch(
        token_ids=tokens, cache_index=tokens, positions=tokens[None], rows=rows, query_start=case.query_start, context_len=case.context_len,
        tables=case.tables, slots=tokens, sample_index=rows, caches=[], block_size=case.block, max_query=case.max_query,
    )  # fmt: skip


def exact(case: Case) -> Tensor:
    rows = case.tables, case.query_start, case.context_len
    return plain.paged_attention(case.q, *case.caches, *rows, case.dim**-0.5, torch.empty_like(case.out))


def wall(run: Callable[[], object], done: Callable[[], None] = lambda: None) -> float:
    """Returns the median microseconds of a run. `done` waits for its end, if that is to be measured."""
    times = []
    for _ in range(ROUNDS):
        synchronize()
        start = time.perf_counter()
        run()
        done()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[ROUNDS // 5 :])


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def measure(case: Case) -> bool:
    """Prints a line for each backend. Returns whether all results are right."""
    batch, cache, reference = batch_of(case), dict(zip("kv", case.caches)), exact(case)
    spec = AttentionSpec(case.heads, case.kv_heads, case.dim, case.dim**-0.5)
    right = True
    for name in NAMES:
        backend: type[AttentionBackend] = load_backend(name, "cuda")
        layer, out = backend(spec), torch.full_like(case.out, torch.nan)

        def attend() -> Tensor:
            return layer.attend(case.q, cache, batch, out)  # noqa: B023 -- used in this turn only

        def prepare() -> None:
            batch.attention = backend.prepare(batch)  # noqa: B023

        def step() -> None:
            prepare()
            attend()

        step()
        error = distance(out, reference)
        right &= error < WORST
        times = microseconds([attend]), wall(step, synchronize), wall(prepare)
        print(f"  {name:12} error {error:.1e}   in a graph {times[0]:9.1f}   a step {times[1]:9.1f}   host {times[2]:9.1f}", flush=True)
    return right


def replay_decode(heads: int, kv_heads: int, dim: int) -> bool:
    """Captures FlashInfer's decode wrapper, and replays it after a plan for shorter contexts. Returns whether the result is right."""
    case = Case(MIXES["decode, 64 rows"], heads, kv_heads, dim)
    rows, width = case.tables.shape
    buffers = [torch.empty(size, dtype=torch.int32, device=DEVICE) for size in (rows + 1, rows * width, rows)]
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    options: dict[str, Any] = dict(zip(names, buffers))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_cuda_graph=True, use_tensor_cores=True, **options)
    contexts = [context for _, context in case.mix]

    def plan(lengths: list[int]) -> None:
        used = [-(-length // case.block) for length in lengths]
        starts = torch.tensor([0, *used]).cumsum(0).int()
        blocks = torch.cat([case.tables[row, :count] for row, count in enumerate(used)])
        last = torch.tensor([length - (count - 1) * case.block for length, count in zip(lengths, used)], dtype=torch.int32)
        dtypes = {"q_data_type": case.dtype, "kv_data_type": case.dtype}
        wrapper.plan(starts, blocks, last, heads, kv_heads, dim, case.block, sm_scale=dim**-0.5, **dtypes)

    def run() -> object:
        return wrapper.run(case.q, tuple(case.caches), out=case.out, enable_pdl=False)

    plan(contexts)
    run()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    shorter = [max(length // 2 - 3, 1) for length in contexts]
    plan(shorter)
    case.out.fill_(torch.nan)
    graph.replay()
    case.context_len.copy_(torch.tensor(shorter))
    error = distance(case.out, exact(case))
    print(f"  replayed after another plan: error {error:.1e}   a plan {wall(lambda: plan(contexts)):.1f}", end="   ")
    plan(contexts)
    both = wall(lambda: (plan(contexts), graph.replay()), synchronize)
    print(f"a replay {wall(graph.replay, synchronize):.1f}   plan and replay {both:.1f}", flush=True)
    return error < WORST


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=[*SHAPES], help="one head size")
    only = parser.parse_args().only
    right = []
    for name, shape in SHAPES.items():
        if only not in (None, name):
            continue
        for mix in MIXES:
            start = time.perf_counter()
            print(f"heads of {name}: {mix}", flush=True)
            right.append(measure(Case(MIXES[mix], *shape)))
            print(f"  {time.perf_counter() - start:.0f} s", flush=True)
        if ON_GPU:
            right.append(replay_decode(*shape))
    print(f"{sum(right)} of {len(right)} right")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
