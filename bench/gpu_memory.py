"""What an engine takes of a GPU beside what was planned, part by part: `python bench/gpu_memory.py [--model 0.6B] [--set NAME=VALUE]`.

Bytes are those missing from the GPU, read by another process, so that CUDA's own are seen, too; torch says what of it is its own.
The load fills every row and steps of the largest size. `context` and `libraries` are the constants of `policy/gpu_size.py`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from octavo.bench import loads
from octavo.policy.gpu_size import CONTEXT, LIBRARIES

MIB = 2**20
MODELS = {"0.6B": loads.QWEN3_06B, "8B": loads.QWEN3_8B}


def watched(settings: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(what the other process has done, bytes it holds, what it says)"""
    before, _ = torch.cuda.mem_get_info()
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    for line in process.stdout:
        if line.startswith("{"):
            said = json.loads(line)
            yield said.pop("done"), before - torch.cuda.mem_get_info()[0], said
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.wait() == 0


def child(settings: dict[str, Any]) -> None:
    def done(what: str, **said: Any) -> None:
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        print(json.dumps({"done": what, "reserved": reserved, "peak": torch.cuda.max_memory_allocated(), **said}), flush=True)
        sys.stdin.readline()

    torch.cuda.mem_get_info()
    done("context")
    from octavo import LLM, SamplingParams
    from octavo.policy.memory_plan import plan_memory
    from octavo.worker.memory import memory

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[settings.pop("model")]))
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, device="cuda", **settings)
    worker = llm._engine._core.executor._runner  # type: ignore[union-attr]
    plan = plan_memory(worker.needs, worker.config, memory(worker.config)).use
    weights, pool = worker.needs.weights, sum(buffer.nbytes for cache in worker.store.caches for buffer in cache.values())
    planned = {name: getattr(plan, name) for name in ("activations", "graphs", "rows", "other")} | {"weights": weights, "kv_cache": pool}
    done("ready", planned=planned)
    rows, tokens = worker.config.max_num_seqs, worker.config.max_num_batched_tokens
    prompts = [[(7 * row + at) % 9973 for at in range(max(2 * tokens // rows, 16))] for row in range(rows)]
    for extra in ({"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "repetition_penalty": 1.1}):
        llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, **extra), use_tqdm=False)
        done(f"load {extra}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="0.6B", choices=MODELS)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(json.loads(args.child))
    settings = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}
    planned: dict[str, int] = {}
    for what, held, said in watched({"model": args.model, **settings}):
        planned = said.get("planned", planned)
        own = held - said["reserved"]
        print(f"{what:45} held {held / MIB:9,.0f} MiB   torch {said['reserved'] / MIB:9,.0f}   most in use {said['peak'] / MIB:9,.0f}   "
              f"CUDA and libraries {own / MIB:6,.0f}", flush=True)  # fmt: skip
    total = sum(planned.values())
    print("planned: " + ", ".join(f"{name} {size / MIB:,.0f}" for name, size in planned.items()) + f", in all {total / MIB:,.0f} MiB")
    print(f"held at last / planned: {held / total:.3f}   (constants: context {CONTEXT / MIB:.0f}, libraries {LIBRARIES / MIB:.0f})")


if __name__ == "__main__":
    main()
