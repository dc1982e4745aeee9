"""What reading keys together costs and saves: `python bench/shared_keys.py [--torch | --gpu | --host]`.

    nothing     fits NATIVE_COST of octavo/step/shared_keys.py: rows that share their first keys, read together and each for itself
    --torch     the same for TORCH_COST
    --gpu       the same for GPU_COST, with the heads of Qwen3-0.6B
    --host      how long a step looks for what its rows share: a step like the one before, one with a new row, one with all new

Attention is that of the default model's layers, over as many caches as it takes to find none of them in the processor's. A key counts as
one that has to be read from memory; on a GPU, rows that share keys and read them alone find most of them in its cache.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import numpy as np
import torch

from octavo.attention.cpu import CpuBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.kernels.cpu.attention_case import AttentionCase
from octavo.kernels.cpu.library import F16, F32, Model, NativeLibrary, address, find_library
from octavo.step.shared_keys import FREE, NATIVE_COST, NOTHING, ReadCost, SharedKeys, SharedReads
from octavo.worker.step_sharing import StepTeams

ROWS, KEYS, OWN = (2, 4, 8, 16, 32), (32, 64, 128, 256, 512), 40
CACHE_BYTES = 96 << 20  # of all caches that are read in turn
NEVER = ReadCost(1 << 40, 0)


def case_of(rows: int, keys: int, kind: int, cost: ReadCost) -> AttentionCase:
    shared = (0, *(keys // 16,) * (rows - 1))
    return AttentionCase(((keys + OWN, 1),) * rows, heads=9, kv_heads=3, head_dim=64, cache_kind=kind, shared=shared, cost=cost)


def least_ms(run: Callable[[], object], calls: int = 60) -> float:
    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return 1000 * float(np.median([once() for _ in range(calls)]))


def native_ms(case: AttentionCase, library: NativeLibrary) -> float:
    k, v = case.past()
    count = 1 + CACHE_BYTES // (2 * k.values.nbytes)
    copies = [(replace(k, values=k.values.copy()), replace(v, values=v.values.copy())) for _ in range(count)]
    cos, sin = np.cos(case.angles), np.sin(case.angles)
    layers = [case.layer(cos, sin, *copy) for copy in copies]
    models = cycle([Model(num_layers=1, cache_kind=case.cache_kind, eps=1e-6, layers=ctypes.pointer(layer)) for layer in layers])
    qkv, out, step = case.projected.copy(), np.empty((len(case.positions), case.heads, case.head_dim), np.float32), case.step()
    return least_ms(lambda: library.call.octavo_attend(ctypes.byref(next(models)), 0, ctypes.byref(step), address(qkv), address(out)))


def torch_ms(case: AttentionCase) -> float:
    keys = case.shared_keys
    caches = [{name: torch.from_numpy(cache.values.copy()) for name, cache in zip("kv", case.past())}]
    caches *= 1 + CACHE_BYTES // (2 * caches[0]["k"].nbytes)
    caches = [{name: buffer.clone() for name, buffer in cache.items()} for cache in caches]
    layer = CpuBackend(AttentionSpec(num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim, scale=case.head_dim**-0.5))
    batch = ForwardBatch(
        token_ids=torch.zeros(len(case.rows), dtype=torch.long), cache_index=torch.from_numpy(case.cache_index),
        positions=torch.from_numpy(case.positions)[None],
        rows=torch.arange(len(case.rows)), query_start=torch.from_numpy(case.query_start), context_len=torch.from_numpy(case.context_len),
        tables=torch.from_numpy(case.tables), slots=torch.from_numpy(case.new_slots), sample_index=torch.zeros(0), caches=[],
        block_size=case.block_size, shared=SharedKeys(keys.nodes, keys.rows) if len(keys.nodes) else NOTHING,
    )  # fmt: skip
    batch.attention = layer.prepare(batch)
    q, turn = torch.randn(len(case.rows), case.heads, case.head_dim), cycle(caches)
    with torch.inference_mode():
        return least_ms(lambda: layer.attend(q, next(turn), batch, torch.empty_like(q)))


def gpu_ms(rows: int, keys: int, cost: ReadCost) -> float:
    """Of one layer, in a graph of several."""
    from octavo.kernels.triton.attention.paged_attention import paged_attention, shares_of, team_sizes

    heads, kv_heads, dim, blocks, device = 16, 8, 128, keys // 16, torch.device("cuda")
    tables = np.tile(np.arange(1, blocks + 9, dtype=np.int32), (rows, 1))
    tables[:, blocks:] = 1 + blocks + np.arange(rows * 8).reshape(rows, 8)
    context = np.full(rows, keys + 8 * 16, np.int32)
    nodes = SharedReads(tables, 16, cost).nodes(np.arange(rows, dtype=np.int32), context, np.zeros(rows, np.int64))
    teams = StepTeams(1, rows, *team_sizes(heads, kv_heads, dim, torch.bfloat16, device), device)
    teams.send([nodes], rows)
    caches = [torch.randn(2, 1 + blocks + 8 * rows, 16, kv_heads, dim, device=device, dtype=torch.bfloat16) for _ in range(8)]
    q = torch.randn(rows, heads, dim, device=device, dtype=torch.bfloat16)
    starts, lengths = torch.arange(rows + 1, device=device, dtype=torch.int32), torch.from_numpy(context).to(device)
    placed, out, graph = torch.from_numpy(tables).to(device), torch.empty_like(q), torch.cuda.CUDAGraph()

    def step() -> None:
        shares = shares_of(starts, lengths, caches[0][0], None, teams=teams.of_group[0] if len(nodes.nodes) else None)
        for k, v in caches:
            paged_attention(q, k, v, placed, starts, lengths, dim**-0.5, out, 1, shares=shares)

    step()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return least_ms(replay) / len(caches)


def fit(measure: Callable[[int, int, ReadCost], float], all_rows: tuple[int, ...] = ROWS, all_keys: tuple[int, ...] = KEYS) -> None:
    """What is saved is so much for each key that need not be read again, less so much for a node and for each of its rows."""
    lines, saved, whole = [], [], []
    for rows in all_rows:
        for keys in all_keys:
            alone, together = (measure(rows, keys, cost) for cost in (NEVER, FREE))
            lines.append(((rows - 1) * keys, -1, -rows))
            saved.append(alone - together)
            whole.append(alone)
            print(f"{rows:3} rows, {keys:4} keys: {alone:.3f} ms each for itself, {together:.3f} ms together", flush=True)
    weights = 1 / np.array(whole)  # what counts is the share of the time that is saved
    key, node, row = np.linalg.lstsq(np.array(lines) * weights[:, None], np.array(saved) * weights, rcond=None)[0]
    print(f"a key of one row: {1e6 * key:.0f} ns; a node costs {node / key:.0f} keys, and {row / key:.0f} for each of its rows")


def host(rows: int, blocks: int) -> None:
    tables = np.tile(np.arange(1, blocks + 1, dtype=np.int32), (rows, 1))
    tables[:, blocks // 2 :] = 1 + blocks + np.arange(rows * (blocks - blocks // 2)).reshape(rows, -1)
    names, context, versions = np.arange(rows, dtype=np.int32), np.full(rows, blocks * 16, np.int32), np.zeros(rows, np.int64)

    def once(reads: SharedReads) -> float:
        start = time.perf_counter()
        reads.nodes(names, context, versions)
        return 1000 * (time.perf_counter() - start)

    reads = SharedReads(tables, 16, NATIVE_COST)
    first, same = once(reads), float(np.median([once(reads) for _ in range(50)]))
    new = []
    for row in range(min(rows, 20)):
        versions[row] += 1
        new.append(once(reads))
    times = f"like the step before {same:.3f} ms, with a new row {np.median(new):.3f} ms, all of them new {first:.1f} ms"
    print(f"{rows:5} rows x {blocks:5} blocks: {times}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--host", action="store_true")
    args = parser.parse_args()
    if args.host:
        for rows, blocks in ((1, 20), (16, 100), (256, 200), (1024, 2000)):
            host(rows, blocks)
        return
    if args.gpu:
        return fit(gpu_ms, (16, 32, 64, 128, 256), (256, 512, 1024, 2048, 8192))
    if args.torch:
        return fit(lambda rows, keys, cost: torch_ms(case_of(rows, keys, F32, cost)))
    library = find_library()
    assert isinstance(library, NativeLibrary), library
    library.call.octavo_set_threads(torch.get_num_threads())
    fit(lambda rows, keys, cost: native_ms(case_of(rows, keys, F16, cost), library))


if __name__ == "__main__":
    main()
