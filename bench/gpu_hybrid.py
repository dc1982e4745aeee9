"""Gated DeltaNet on one NVIDIA GPU, in the shapes of Qwen3.5-9B, 27B and 35B-A3B: `python -m bench.gpu_hybrid [--parts states,prompt]`.

    states    the state update of decode steps: microseconds, and TB/s of states read and written, at 1 to 256 rows
    prompt    the kernels of a prompt of 8,192 tokens, and their time as a share of that of the matrix products around them
    loads     whole engines with random weights on published loads, beside the least time that reading and multiplying take
    hit       the first token of 20,000 known and 64 new tokens, beside a dense model of Qwen3-8B's shape

Kernels are compared with the reference first, on few tokens. Times are medians of CUDA graphs replayed, over enough states that none
waits in the L2. `--tiny` is for the interpreter: small sizes, times without meaning.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_kernels import BEYOND_L2, DEVICE, DTYPE, distance, microseconds, random
from octavo.kernels.reference import delta_net as plain
from octavo.kernels.triton.delta_net.launch import delta_net, invariant_delta_net
from octavo.kernels.triton.step.norm import gated_norm
from octavo.step.step_tensors import StepStates

READ, MULTIPLIED = 4.27e12, 790e12  # bytes and operations a second that an H200 reaches
AIM = 3.4  # TB/s of states at 256 rows
SHARE = 0.25  # of the products' time, at most, that the kernels of a prompt may take
ERROR = 1.5e-2  # relative, of results in 16 bits
KNOWN = 20_000  # tokens that prompts share, in `hit`


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    k_heads: int = 16
    v_heads: int = 32
    dim: int = 128  # of the heads of q, k and v
    head_dim: int = 256
    vocab: int = 248320
    experts: int = 0  # of `inner` each; one more is shared by all tokens
    chosen: int = 8

    @property
    def channels(self) -> int:
        return (2 * self.k_heads + self.v_heads) * self.dim

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The shapes of the matrices of a recurrent layer, (out, in)."""
        wide = self.v_heads * self.dim
        own = [(self.channels + wide, self.hidden), (2 * self.v_heads, self.hidden), (self.hidden, wide)]
        return [*own, (2 * self.inner, self.hidden), (self.hidden, self.inner)]

    def numbers(self, rows: float) -> float:
        """The numbers of all layers' matrices that a step of so many rows reads, if each row chooses its experts at random."""
        wide, q, kv = self.v_heads * self.dim, self.heads * self.head_dim, self.kv_heads * self.head_dim
        recurrent, attention = self.channels + 2 * wide + 2 * self.v_heads, 3 * q + 2 * kv
        read = 1 + self.experts * (1 - (1 - self.chosen / self.experts) ** rows) if self.experts else 1
        mixers = 3 * recurrent + attention + 4 * self.experts  # four layers have four routers
        return self.layers // 4 * self.hidden * (mixers + 12 * read * self.inner)

    @property
    def multiplied(self) -> float:
        """The numbers by which each token of a prompt is multiplied."""
        return self.numbers(1)

    @property
    def state_bytes(self) -> int:
        """Of a row in one layer."""
        return (self.v_heads * self.dim * self.dim + 3 * self.channels) * 4

    def config(self) -> dict[str, Any]:
        if self.experts:
            return replace(self, experts=0).config() | {
                "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": self.experts,
                "num_experts_per_tok": self.chosen, "moe_intermediate_size": self.inner, "shared_expert_intermediate_size": self.inner,
            }  # fmt: skip
        return {
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab, "linear_num_key_heads": self.k_heads,
            "linear_num_value_heads": self.v_heads, "linear_key_head_dim": self.dim, "linear_value_head_dim": self.dim,
            "max_position_embeddings": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
            "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        }  # fmt: skip


MODELS = {
    "9B": Shape(4096, 12288, 32, 16, 4), "27B": Shape(5120, 17408, 64, 24, 4, v_heads=48),
    "35B-A3B": Shape(2048, 512, 40, 16, 2, experts=256),
}  # fmt: skip
TINY = Shape(64, 96, 4, 2, 1, k_heads=1, v_heads=2, dim=16, head_dim=32, vocab=500)


class Rows:
    """Rows of equally many tokens, each after a state of its own, with a slot to write."""

    def __init__(self, shape: Shape, rows: int, tokens: int) -> None:
        wide = shape.v_heads * shape.dim
        self.qkvz, self.gates = random(rows * tokens, shape.channels + wide), random(rows * tokens, 2 * shape.v_heads)
        heads = torch.randn(2, shape.v_heads, device=DEVICE)
        self.weights, self.norm, self.channels = (random(shape.channels, 4), heads[0], heads[1]), random(shape.dim), shape.channels
        self.conv = torch.randn(2 * rows + 1, 3, shape.channels, device=DEVICE)
        self.recurrent = torch.randn(2 * rows + 1, shape.v_heads, shape.dim, shape.dim, device=DEVICE) * 0.1
        words = torch.arange(1, 2 * rows + 1, device=DEVICE, dtype=torch.int32)
        none = torch.zeros(rows + 1, device=DEVICE, dtype=torch.int32)
        self.query_start = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32) * tokens
        self.states = StepStates(words[:rows], words[rows:], none[:rows], none, torch.zeros(tokens, 2, device=DEVICE, dtype=torch.int32))

    def run(self, kernel: Any = delta_net) -> Tensor:
        qkv = self.qkvz[:, : self.channels]
        out: Tensor = kernel(qkv, self.gates, *self.weights, self.conv, self.recurrent, self.query_start, self.states)
        return out

    def run_with_norm(self) -> Tensor:
        out = self.run()
        return gated_norm(out, self.qkvz[:, self.channels :].view(out.shape), self.norm, 1e-6)


def check(shape: Shape) -> bool:
    """Prints the errors of both forms against the reference, of the results and the states that were written."""
    good = True
    for rows, tokens, kernel in ((3, 1, delta_net), (2, 150, delta_net), (2, 6, invariant_delta_net)):
        case = Rows(shape, rows, tokens)
        found = case.run(kernel).clone(), case.recurrent[rows + 1 :].clone(), case.conv[rows + 1 :].clone()
        expected = case.run(plain.delta_net), case.recurrent[rows + 1 :], case.conv[rows + 1 :]
        errors = [distance(one, other) for one, other in zip(found, expected)]
        good &= all(error <= ERROR for error in errors)
        names = ", ".join(f"{name} {error:.1e}" for name, error in zip(("results", "states", "inputs"), errors))
        print(f"{kernel.__name__:20} {rows} rows of {tokens:3} tokens   {'ok' if errors[0] <= ERROR else 'WRONG'}   {names}", flush=True)
    return good


def print_states(name: str, shape: Shape, counts: list[int]) -> None:
    for rows in counts:
        sets = max(1, min(8, BEYOND_L2 // (rows * shape.state_bytes)))
        took = microseconds([Rows(shape, rows, 1).run for _ in range(sets)])
        rate = 2 * rows * shape.state_bytes / took / 1e6
        print(f"{name} state update, {rows:4} rows   {took:9.1f} us {rate:6.2f} TB/s   {rate / AIM:5.0%} of {AIM} TB/s", flush=True)


def print_prompt(name: str, shape: Shape, tokens: int) -> None:
    case = Rows(shape, 1, tokens)
    rule, norm = microseconds([case.run]), microseconds([case.run_with_norm])
    x = {size: random(tokens, size) for size in {columns for _, columns in shape.matrices}}
    products = 0.0
    for rows, columns in shape.matrices:
        products += microseconds([partial(F.linear, x[columns], random(rows, columns))])
    print(
        f"{name} a prompt of {tokens:,} tokens, a layer   rule {rule:9.1f} us   norm {norm - rule:7.1f} us   products {products:9.1f} us   "
        f"rule / products {rule / products:5.2f}, aim below {SHARE}",
        flush=True,
    )


def least_seconds(shape: Shape, requests: list[tuple[list[int], int]], steps: int) -> float:
    """The least time for requests in so many steps: they read all matrices, the states and keys of their rows, and multiply prompts."""
    prompts, answers = sum(len(ids) for ids, _ in requests), sum(count for _, count in requests)
    contexts = sum(count * len(ids) + count * count // 2 for ids, count in requests)
    matrices, recurrent = 2 * (shape.numbers(answers / steps) + shape.vocab * shape.hidden), shape.layers * 3 // 4
    keys = shape.layers // 4 * 2 * shape.kv_heads * shape.head_dim * 2
    moved = steps * matrices + 2 * answers * recurrent * shape.state_bytes + contexts * keys
    return moved / READ + 2 * prompts * shape.multiplied / MULTIPLIED


class Steps:
    """Counts the steps that an engine runs."""

    def __init__(self, llm: Any) -> None:
        self.count, self._program = 0, llm._core.executor.program
        self._run = self._program.run

    def __enter__(self) -> "Steps":
        self._program.run = self._counted
        return self

    def _counted(self, *given: Any) -> Any:
        self.count += 1
        return self._run(*given)

    def __exit__(self, *_: object) -> None:
        del self._program.run


def random_model(config: dict[str, Any], settings: dict[str, Any]) -> Any:
    from octavo import LLM

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, **{"device": "cuda"} | settings)


def print_loads(name: str, shape: Shape, wanted: list[str], rounds: int, busy: bool, settings: dict[str, Any]) -> None:
    from bench.gpu_loads import print_busy, run
    from octavo.bench import loads

    with random_model(shape.config(), settings) as llm:
        for load in wanted:
            requests = loads.GPU[load]()
            run(llm, [(ids[:64], min(count, 4)) for ids, count in requests[:64]], 0)
            with Steps(llm) as steps:
                seconds = [run(llm, requests, 0.6) for _ in range(rounds)]
            tokens = sum(len(ids) for ids, _ in requests) if load == "prefill" else sum(count for _, count in requests)
            took, least = statistics.median(seconds), least_seconds(shape, requests, steps.count // rounds)
            print(
                f"{name} {load:8} {tokens / took:10,.0f} tok/s   rounds {' '.join(f'{one:.2f}' for one in seconds)} s of "
                f"{steps.count // rounds:,} steps, least {least:.2f} s: {least / took:4.0%}",
                flush=True,
            )
            if busy:
                print_busy(llm, requests, 0.6)


def first_token_after_hit(config: dict[str, Any], settings: dict[str, Any]) -> float:
    """The median of the seconds until the first token of prompts that share `KNOWN` tokens, and have 64 of their own."""
    from octavo import SamplingParams

    rng, params = Random(5), SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    most = config["vocab_size"]
    known, seconds = [rng.randrange(most) for _ in range(KNOWN)], []
    with random_model(config, {"max_model_len": 32768} | settings) as llm:
        for _ in range(9):
            start = time.perf_counter()
            llm.generate([known + [rng.randrange(most) for _ in range(64)]], params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
    print(f"  first {seconds[0] * 1e3:.1f} ms, then " + " ".join(f"{one * 1e3:.1f}" for one in seconds[1:]), flush=True)
    return statistics.median(seconds[2:])  # the second leaves a checkpoint where the known tokens end


def print_hits(name: str, shape: Shape, settings: dict[str, Any]) -> None:
    from octavo.bench import loads

    found, dense = (first_token_after_hit(config, settings) for config in (shape.config(), loads.QWEN3_8B))
    print(f"{name} first token after a hit {found * 1e3:.1f} ms, {found / dense:.2f} of Qwen3-8B's {dense * 1e3:.1f} ms", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--parts", default="states,prompt,loads")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--loads", default="single,nano256,prefill")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="how long the device computes in a round, by kernel")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the interpreter")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    parts, models = args.parts.split(","), {"tiny": TINY} if args.tiny else {name: MODELS[name] for name in args.models.split(",")}
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE == 'cuda' else 'no GPU'}, {DTYPE}")
    with torch.inference_mode():
        if not check(next(iter(models.values()))):
            return 1
        for name, shape in models.items():
            if "states" in parts:
                print_states(name, shape, [1, 3] if args.tiny else [1, 2, 4, 8, 16, 32, 64, 128, 256])
            if "prompt" in parts and not shape.experts:
                print_prompt(name, shape, 80 if args.tiny else 8192)
            if DEVICE == "cuda":
                torch.cuda.empty_cache()  # for the engine, which plans with what is free
    settings = {key: json.loads(value) if value[0].isdigit() else value for key, value in (item.split("=", 1) for item in args.set)}
    for name, shape in models.items():
        if "loads" in parts:
            print_loads(name, shape, args.loads.split(","), args.rounds, args.busy, settings)
        if "hit" in parts:
            print_hits(name, shape, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
