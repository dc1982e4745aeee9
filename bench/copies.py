"""What copies cost, and what contiguous caches cost where paged ones copy nothing.

    python bench/copies.py [--model MODEL] [--device cuda] [--dtype float16]    a fork, a copied block, an exchange of rows, for a sequence
                                                                                of --tokens tokens, of --rows rows at once
    python bench/copies.py --runs [--device cuda]                               whole runs with paged and with contiguous attention, in turn

A fork by reference is work of the host and a line of the request table; the first of both that writes into their last block copies that
block. With contiguous caches a fork copies all keys and values of its parent. MODEL may be a config.json: no weights are read. Without
MODEL it is the default model, and on a GPU the shape of Qwen3-0.6B, with random weights where there is something to run.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

from octavo.bench.loads import QWEN3_06B
from octavo.loading.shape import model_shape
from octavo.messages import NoiseKey, RowFork, StepPlan
from octavo.model_config import ModelConfig
from octavo.models.registry import cache_specs, read_config
from octavo.step.step_tensors import RowLayout
from octavo.worker.kv_store import ContiguousStore, KVStore, PagedStore
from octavo.worker.request_table import RequestTable
from tests.support.fake import FakeEngine, sampling

BLOCK = 16  # tokens
TIMES = 50
NOISE = NoiseKey((1, 2), 3, 4)
BATCH = ("--input-len", "256", "--output-len", "32", "--num-prompts", "16")
LOADS = {"cpu": (("--load", "single"), BATCH), "cuda": (("--loads", "single,nano256"),)}
SHOWN = ("single", "random", "throughput", "per output token, ms", "tok/s")  # lines of a run's output with one of these words


def microseconds(work: Callable[[], object], device: str) -> float:
    """Returns the median. On a GPU it is from the call to the end of what it started."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start)

    return statistics.median([once() for _ in range(TIMES)][TIMES // 5 :])


def forks(count: int) -> StepPlan:
    """Rows with even numbers are copied to those with odd ones."""
    return StepPlan(1, row_forks=[RowFork(2 * number + 1, 2 * number, number, NOISE) for number in range(count)])


def exchanges(count: int) -> StepPlan:
    there = [RowFork(2 * number, 2 * number + 1, number, NOISE, moves=True) for number in range(count)]
    return StepPlan(1, row_forks=[fork for pair in zip(forks(count).row_forks, there) for fork in pair])


def policy_fork(tokens: int) -> float:
    """Microseconds of the scheduler for one fork of a running sequence, and for its end."""
    rows, num_blocks = TIMES + 2, 2 * tokens // BLOCK + 200
    engine = FakeEngine(block_size=BLOCK, num_blocks=num_blocks, rows=rows, budget=max(tokens, rows), max_len=tokens + 64)
    (parent,) = engine.add("parent", [number % 50 for number in range(tokens)], sampling(32)).sequences
    while parent.num_tokens <= tokens:
        engine.step()
    children = iter(range(1, TIMES + 1))
    return microseconds(lambda: engine.scheduler.moves.fork(parent, next(children)), "cpu")


def config_of(model: str | None, device: str) -> ModelConfig:
    return read_config(QWEN3_06B, "Qwen3-0.6B") if model is None and device == "cuda" else model_shape(model).config


def costs(model: ModelConfig, device: str, dtype: str, tokens: int, rows: int) -> None:
    specs = cache_specs(model, dtype)
    place, blocks = torch.device(device), -(-tokens // BLOCK)
    block_bytes = BLOCK * sum(spec.bytes_per_token for spec in specs)
    paged: KVStore = PagedStore(specs, 2 * rows + 2, BLOCK, place)
    copied = StepPlan(1, copies=[(1 + 2 * number, 2 + 2 * number) for number in range(rows)])
    table = RequestTable(2 * rows, RowLayout(blocks + 4, tokens + 64), place)
    contiguous: KVStore = ContiguousStore(specs, 2 * rows, blocks * BLOCK, place)
    lines = (
        ("a fork by reference, scheduler", policy_fork(tokens), 0),
        ("the same, line of the request table", microseconds(lambda: table.apply(forks(rows)), device) / rows, 0),
        ("a block that is copied on write", microseconds(lambda: paged.apply(copied), device) / rows, block_bytes),
        ("an exchange of two rows", microseconds(lambda: table.apply(exchanges(rows)), device) / rows, 0),
        ("a fork of a contiguous cache", microseconds(lambda: contiguous.apply(forks(rows)), device) / rows, blocks * block_bytes),
    )
    print(f"{tokens} tokens, {rows} at once, {block_bytes / 1024:.0f} KiB a block of {BLOCK} tokens, {device} {dtype}")
    for what, cost, size in lines:
        print(f"  {what:38} {cost:10,.1f} us" + (f"   {size / 2**20:8.2f} MiB" if size else ""))


def run_command(device: str, backend: str, load: tuple[str, ...]) -> list[str]:
    """Both attentions have the same rows and lengths. A contiguous cache has a region of the longest sequence for every row."""
    if device == "cuda":
        settings = (f"attention_backend={backend}", "enable_prefix_caching=false", "max_model_len=2048", "max_num_seqs=256")
        return [str(Path(__file__).with_name("gpu_loads.py")), *load, "--set", *settings]
    settings = ("--attention-backend", backend, "--no-enable-prefix-caching", "--max-model-len", "1024", "--max-num-seqs", "32")
    return ["-m", "octavo", "bench", "throughput", "--rounds", "1", *load, *settings]


def runs(device: str, rounds: int) -> None:
    """Prints how fast whole runs are with either attention, in turn, as often as `rounds` says."""
    for _ in range(rounds):
        for load, backend in product(LOADS[device], ("triton" if device == "cuda" else "cpu", "contiguous")):
            command = [sys.executable, *run_command(device, backend, load)]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            print(backend, *(line for line in said.splitlines() if any(word in line for word in SHOWN)), sep="\n  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.runs:
        return runs(args.device, args.rounds)
    model = config_of(args.model, args.device)
    for rows in args.rows:
        costs(model, args.device, args.dtype, args.tokens, rows)


if __name__ == "__main__":
    main()
