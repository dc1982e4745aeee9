"""Where the time of one decode step goes on a GPU: `python bench/gpu_step.py [--model 0.6B] [--rows 1,256] [--context 600]`.

For each number of rows: the replay of its graph, timed by events over many replays, and its kernels by name out of torch's profiler;
what is left between them are gaps. Weights are random, of Qwen3's shapes.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_loads import MODELS
from octavo import LLM
from octavo.kernels.row_words import NUM_TOKENS
from octavo.messages import StepPlan
from octavo.worker.device_rows import send
from octavo.worker.device_runner import DeviceRunner, entries


def open_runner(model: str, settings: dict[str, Any]) -> tuple[LLM, DeviceRunner]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, device="cuda", **settings)
    worker: Any = llm._client._core.executor._runner  # type: ignore[attr-defined]
    return llm, worker.runner


def lay_out(runner: DeviceRunner, rows: int, context: int, block_size: int = 16) -> None:
    """Rows of `context` tokens, the last of which is to be computed, over blocks anywhere in the pool."""
    blocks, pool = -(-context // block_size), runner.store.caches[0]["k"].shape[0]
    words, layout = runner.rows.words, runner.rows.layout
    chosen = torch.randperm(pool - 1, device=words.device)[: rows * blocks].to(torch.int32) + 1
    runner.rows.tables[:rows, :blocks] = chosen.view(rows, blocks)
    words[:rows, layout.tokens : layout.tokens + context] = torch.randint(0, 10000, (rows, context), device=words.device, dtype=torch.int32)
    words[:rows, NUM_TOKENS] = context
    runner.rows.temperature[:rows] = 0.6


def time_step(runner: DeviceRunner, rows: int, context: int) -> None:
    lay_out(runner, rows, context)
    steps = runner.steps
    shape = steps.shape_of(rows, rows)
    plan = StepPlan(1, list(range(rows)), [0] * rows, [context - 1] * rows, [1] * rows, [False] * rows)
    send(entries(plan, shape), steps.program.memory.entries)
    times = []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            steps.run(shape)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    print(f"\n{rows} rows of {context} tokens: {statistics.median(times):,.0f} us a step")
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(5):
            steps.run(shape)
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in traced.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name.split("<")[0][:60]].append(event.time_range.elapsed_us())
    for name, each in sorted(spent.items(), key=lambda item: -sum(item[1]))[:14]:
        print(f"  {sum(each) / 5:9.1f} us {len(each) // 5:5} x {statistics.median(each):8.2f} us   {name}")
    print(f"  {sum(sum(each) for each in spent.values()) / 5:9.1f} us in kernels")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="0.6B", choices=MODELS)
    parser.add_argument("--rows", default="1,256")
    parser.add_argument("--context", type=int, default=600)
    args = parser.parse_args()
    llm, runner = open_runner(args.model, {"kv_cache_memory_bytes": 30 << 30, "max_model_len": 4096})
    with torch.inference_mode():
        for rows in map(int, args.rows.split(",")):
            time_step(runner, rows, args.context)
    del llm


if __name__ == "__main__":
    main()
