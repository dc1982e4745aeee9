"""Where an engine differs from what is compiled ahead for it: `python -m tests.support.variants 90` says, a line each.

    missing     the warm-up calls it, and nobody compiled it        needless    compiled, and never called (codes: not said)
    late        called after the warm-up for the first time

Triton compiles a kernel once more for other types, for pointers that are not aligned, for other constants. Its hook tells the key
of what it would compile. So plans of every kind are carried out by the runner of a device on tensors that pretend to be on a
GPU; nothing is compiled or launched, and there need be none.
"""

import functools
import sys
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver

from octavo.attention.triton import TritonBackend
from octavo.config import Debug
from octavo.kernels import ops
from octavo.kernels.kernel_shapes import PackedShape
from octavo.kernels.row_words import RowLayout
from octavo.layers.comm import NullComm
from octavo.loading.loader import load_packed
from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.model_config import RopeConfig
from octavo.models.dense_family import DenseConfig
from octavo.models.registry import build_model, cache_specs, describe
from octavo.quant.packed import PackedWeight, quantize
from octavo.quant.schemes import Packed
from octavo.sampling_params import SamplingParams
from octavo.worker.compile_process import NoGPU, find_jobs
from octavo.worker.compilers import DRIVER, Wanted, kernel_shapes, variant
from octavo.worker.faults import Faults
from octavo.worker.graph_program import Graph
from octavo.worker.kv_store import PagedStore
from octavo.worker.model_runner import ModelRunner
from octavo.worker.program import Eager
from octavo.worker.request_table import RequestTable

CPU, SIZE, ROWS, TOKENS, CAPTURED, LENGTH = torch.device("cpu"), 16, 20, 600, 512, 2048
QWEN3 = DenseConfig(
    architecture="Qwen3ForCausalLM", vocab_size=1000, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, max_position=LENGTH, norm_eps=1e-6, rope=RopeConfig(), tie_embeddings=True, qkv_bias=False, output_bias=False,
    mlp_bias=False, qk_norm="heads", windows=(None, None), dtype="bfloat16", eos_token_ids=(), bos_token_id=None,
)  # fmt: skip
MODELS = [
    (QWEN3, "bfloat16", False),
    (replace(QWEN3, hidden_size=1024, qkv_bias=True), "bfloat16", True),
    (replace(QWEN3, architecture="Qwen2ForCausalLM", qk_norm=None, qkv_bias=True, windows=(None, 64)), "float16", False),
    (replace(QWEN3, architecture="LlamaForCausalLM", qk_norm=None, head_dim=48, tie_embeddings=False), "float32", False),
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"top_k": 5, "logprobs": 3, "prompt_logprobs": 2},
    {"frequency_penalty": 1.0, "temperature": 0},
    {"logprobs": 20},
    {"top_p": 0.4, "logit_bias": {3: 1.0}},
    {"min_p": 0.1},
    {"temperature": 0.7},
]


def pretend() -> None:
    """Tensors are on a GPU, memory that is pinned is like any other, and products of torch are made and not computed."""
    torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment, method-assign]
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[assignment, method-assign]
    for name in ("tensor", "empty"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.mm = torch.addmm = lambda *_, out: out  # type: ignore[assignment]
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_empty(len(x), len(weight))  # type: ignore[assignment]
    torch.cuda.Event = lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None)  # type: ignore[assignment, misc]


def _without_pinning(make: Any) -> Any:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*arguments, **options)

    return made


def record() -> set[str]:
    met: set[str] = set()

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        met.add(variant(fn, key))
        return True  # that is, do not compile it

    knobs.runtime.jit_cache_hook = hook
    return met


class ZeroCodes:
    """Stands for a checkpoint whose layers have nothing but zeros, as codes; the rest is floats."""

    def __init__(self, config: DenseConfig) -> None:
        heads, kv_heads, inner, self.config = config.num_heads, config.num_kv_heads, config.intermediate_size, config
        self.shapes = {
            "qkv": ((heads + 2 * kv_heads) * config.head_dim, config.hidden_size), "gate_up": (2 * inner, config.hidden_size),
            "output": (config.hidden_size, heads * config.head_dim), "down": (config.hidden_size, inner),
        }  # fmt: skip

    @property
    def packed(self) -> tuple[PackedShape, ...]:
        return tuple(
            PackedShape(*shape, 4, 32, name == "qkv" and self.config.qkv_bias, name == "gate_up")
            for name, shape in self.shapes.items()
        )

    def codes(self, name: str) -> PackedWeight | None:
        matrix = name.split(".")[-2]
        return quantize(torch.zeros(self.shapes[matrix]), 4, 32) if matrix in self.shapes else None

    def shape(self, name: str) -> tuple[int, int]:
        return self.config.vocab_size, self.config.hidden_size

    def copy(self, name: str, target: torch.Tensor) -> None:
        pass


def build_runner(config: DenseConfig, dtype: str, codes: ZeroCodes | None) -> tuple[ModelRunner, Graph]:
    scheme = Packed() if codes else None
    model = build_model(config, getattr(torch, dtype), TritonBackend, NullComm(), LENGTH, scheme)  # type: ignore[arg-type]
    if codes:
        load_packed(model, codes)  # type: ignore[arg-type]
    table = RequestTable(ROWS, RowLayout(LENGTH // SIZE, LENGTH + 1), CPU)
    store = PagedStore(cache_specs(config, dtype), 40, SIZE, CPU)
    graph = Graph(Eager(model, TritonBackend, store.caches, table, SIZE, TOKENS), ROWS, TOKENS, CAPTURED)  # type: ignore[arg-type]
    return ModelRunner(graph, ops, store, table, Faults(Debug())), graph


def plans() -> list[StepPlan]:
    """Rows of every kind of sampling are written, decode in numbers odd and even, and have prompts long and short."""
    noise = NoiseKey((1, 2), 3, 4)
    prompt = array("q", range(600))
    writes = [RowWrite(row, row, prompt, 599, 0, [[]], SamplingParams(**kind), (1,), [], noise, b"") for row, kind in enumerate(KINDS)]
    every = list(range(len(KINDS)))
    made = [StepPlan(1, every, every, [0] * 7, [80] * 7, [True] * 7, row_writes=writes, new_blocks=[(row, 0, 0, 1 + row) for row in every])]
    for rows in ([0], [1], [0, 1], [2, 3, 4], [1, 3, 5, 6], [0, 1, 2, 3, 4], every):
        made.append(StepPlan(1, rows, rows, [90] * len(rows), [1] * len(rows), [True] * len(rows)))
    for count in (2, 7, 33, 599):
        made.append(StepPlan(1, [5, 1], [5, 1], [20, 3], [1, count], [True, True]))
    made.append(StepPlan(1, copies=[(1, 2)], row_forks=[RowFork(7, 1, 7, noise)]))
    made.append(StepPlan(1, [7], [7], [90], [1], [True], copies=[(1, 2), (2, 3)]))
    return made


def main(capability: int) -> None:
    for config, dtype, packed in MODELS:
        codes = ZeroCodes(config) if packed else None
        shapes = kernel_shapes(describe(config), kept=[])
        assert shapes is not None
        shapes = replace(shapes, packed=codes.packed if codes else ())
        jobs, _ = find_jobs(Wanted(shapes, dtype, SIZE, LENGTH, "nhd", capability, 1))
        ahead = {job.name for job in jobs} - {DRIVER}
        assert len(ahead) > 20
        driver.set_active(NoGPU(capability))
        met = record()
        pretend()
        runner, graph = build_runner(config, dtype, codes)
        graph.warm_up()
        runner.warm_up(getattr(torch, dtype))
        warm = set(met)
        for plan in plans():
            runner.forward(plan)
            runner.sample()
        for word, names in {"missing": warm - ahead, "needless": set() if packed else ahead - warm, "late": met - warm}.items():
            print("".join(f"{word} {name}\n" for name in sorted(names)), end="")


if __name__ == "__main__":
    main(int(sys.argv[1]))
