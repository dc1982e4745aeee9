"""Measures the seconds from the start of a process to its first token, with random weights of Qwen3's shapes.

    python bench/gpu_ready.py [--model 0.6B] [--rounds 2] [--check]

Each round is a fresh process: cold ones find Triton's cache empty, warm ones find it as the last cold one left it. The phases are
what the engine logs. --check: one more process, which serves every kind of request once it is ready, and counts what Triton
compiles or loads from then on: nothing may.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from octavo.bench import loads
from octavo.bench.startup import PHASE

TINY = loads.QWEN3_06B | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 4000, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MODELS = {"0.6B": loads.QWEN3_06B, "8B": loads.QWEN3_8B, "tiny": TINY}
AIMS = {"0.6B": 8, "8B": 15}
KINDS = [
    {"temperature": 0}, {"temperature": 0.6}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"presence_penalty": 1.0}, {"frequency_penalty": 0.5, "temperature": 0}, {"repetition_penalty": 1.2, "top_p": 0.5},
    {"logit_bias": {5: 2.0}}, {"allowed_token_ids": [1, 2, 3]}, {"min_tokens": 3}, {"logprobs": 0}, {"logprobs": 5}, {"logprobs": 20},
    {"prompt_logprobs": 3}, {"prompt_logprobs": 0, "logprobs": 1, "top_k": 3}, {"n": 3}, {"n": 4, "top_p": 0.7, "logprobs": 2},
]  # fmt: skip


def start(model: str, check: bool, device: str = "cuda") -> None:
    """The process that is measured."""
    from octavo import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        blocks = 4096 if model == "tiny" else None  # others may use the GPU beside a test
        llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, device=device, num_gpu_blocks_override=blocks)
    print("ready", flush=True)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
    print("first token", flush=True)
    if check:
        serve_everything(llm)
    llm.close()


def serve_everything(llm: "LLM") -> None:  # type: ignore[name-defined]  # noqa: F821
    from triton import knobs

    from octavo import SamplingParams

    met: list[str] = []
    knobs.compilation.listener = lambda *, src, cache_hit, **_: met.append(f"{src.name} ({'loaded' if cache_hit else 'compiled'})")
    params = [SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False, **kind) for kind in KINDS]
    for count in (1, 2, 3, 4, 5, 8, 9, 33, 100, 257, 600):
        wanted = [params[number % len(params)] for number in range(count)]
        llm.generate([[7 + count, *range(2, 3 + number % 90)] for number in range(count)], wanted, use_tqdm=False)
    for length in (2, 17, 255, 256, 1025, 3000, min(llm.max_model_len - 8, 12000)):
        llm.generate([[3] * length, [4] * 5], [params[3], params[4]], use_tqdm=False)
        llm.generate([[5] * length], params[15], use_tqdm=False)
    print(f"compiled after ready: {len(met)} {' '.join(sorted(set(met)))}", flush=True)


def measure(model: str, cache: str, check: bool = False) -> tuple[dict[str, float], list[str]]:
    """Returns the seconds to each milestone and of each phase, and what else was printed."""
    command = [sys.executable, __file__, "--model", model, "--start", *(["--check"] if check else [])]
    found: dict[str, float] = {}
    said = []
    with tempfile.TemporaryFile("w+") as log:
        begun, environment = time.perf_counter(), {**os.environ, "TRITON_CACHE_DIR": cache}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as child:
            assert child.stdout is not None
            for line in child.stdout:
                found[line.strip()] = time.perf_counter() - begun
                said.append(line.strip())
        log.seek(0)
        lines = log.read().splitlines()
    if child.returncode:
        raise SystemExit("\n".join(["the process failed:", *lines[-15:]]))
    phases = {phase["name"]: float(phase["seconds"]) for line in lines if (phase := PHASE.search(line))}
    return phases | {name: found[name] for name in ("ready", "first token")}, said


def print_table(model: str, rounds: dict[str, list[dict[str, float]]]) -> None:
    columns = {kind: {name: statistics.median(one[name] for one in some) for name in some[0]} for kind, some in rounds.items() if some}
    print(f"{model}, seconds{'':34}" + "".join(f"{kind:>8}" for kind in columns))
    for name in next(iter(columns.values())):
        print(f"  {name:46}" + "".join(f"{column.get(name, 0):8.2f}" for column in columns.values()))
    for kind, some in rounds.items():
        times = " ".join(f"{one['first token']:.1f}" for one in some)
        print(f"{model} {kind}: first token after {times} s, aim {AIMS.get(model, '-')}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="0.6B", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="count what is compiled after ready, over every kind of request")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        start(args.model, args.check)
        return
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("cold", "warm"):
            for number in range(args.rounds):
                rounds[kind].append(measure(args.model, f"{folder}/{number if kind == 'cold' else args.rounds - 1}")[0])
        if args.check:
            print(measure(args.model, f"{folder}/{max(args.rounds - 1, 0)}", check=True)[1][-1])
    if args.rounds:
        print_table(args.model, rounds)


if __name__ == "__main__":
    main()
