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
from typing import Any, cast

import torch
from triton import knobs
from triton.runtime.driver import driver

from octavo.attention.triton import TritonBackend
from octavo.comm.comm import NullComm
from octavo.kernels import ops
from octavo.kernels.fp8_matrix import Fp8Matrix, zero_fp8
from octavo.kernels.kernel_shapes import Fp8Shape, PackedShape
from octavo.kernels.triton import fp8
from octavo.loading.loader import load_packed
from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.model_config import RopeConfig
from octavo.models.dense_family import DenseConfig, dense_config
from octavo.models.description import NormShape
from octavo.models.registry import build_model, cache_specs, describe, read_config
from octavo.quant.packed import PackedWeight, quantize
from octavo.quant.schemes import Packed
from octavo.sampling_params import SamplingParams
from octavo.step.step_tensors import RowLayout
from octavo.worker.compile_process import NoGPU, find_jobs
from octavo.worker.compilers import DRIVER, Wanted, variant
from octavo.worker.graph_program import Graph
from octavo.worker.kernel_shapes import kernel_shapes
from octavo.worker.kv_store import PagedStore
from octavo.worker.model_runner import ModelRunner
from octavo.worker.program import Eager
from octavo.worker.request_table import RequestTable
from octavo.worker.step_sharing import StepTeams

BF16: dict[str, Any] = {"dtype": torch.bfloat16}
CPU, SIZE, ROWS, TOKENS, CAPTURED, LENGTH = torch.device("cpu"), 16, 20, 600, 512, 2048
QWEN3: dict[str, Any] = {
    "architecture": "Qwen3ForCausalLM", "vocab_size": 1000, "hidden_size": 64, "inner": 128, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 64, "max_position": LENGTH, "norm": NormShape(1e-6), "rope": RopeConfig(), "tie_embeddings": True,
    "qkv_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": "heads", "dtype": "bfloat16", "eos_token_ids": (),
    "bos_token_id": None,
}  # fmt: skip
QWEN2 = {"architecture": "Qwen2ForCausalLM", "qk_norm": None, "qkv_bias": True, "windows": (None, 64)}
LLAMA = {"architecture": "LlamaForCausalLM", "qk_norm": None, "head_dim": 48, "tie_embeddings": False}
COHERE2 = {
    "architecture": "Cohere2ForCausalLM", "norm": NormShape(1e-5, "layer"), "parallel": True, "windows": (64, None),
    "ropes": (RopeConfig(), None), "qk_norm": None, "logit_scale": 0.25,
}  # fmt: skip
BLOOM = {
    "architecture": "BloomForCausalLM", "norm": NormShape(1e-5, "layer", bias=True), "normed_embedding": True, "num_kv_heads": 4,
    "rope": None, "alibi": True, "qk_norm": None, "activation": "gelu", "qkv_bias": True, "output_bias": True, "mlp_bias": True,
}  # fmt: skip
QWEN35: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
GLM_LITE: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 20, "num_key_value_heads": 20, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5, "kv_lora_rank": 64,
    "q_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
V2_LITE = GLM_LITE | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "num_attention_heads": 3, "num_key_value_heads": 3}
MODELS = [
    (dense_config(QWEN3 | fields), dtype, form)
    for fields, dtype, form in (
        ({}, "bfloat16", ""),
        ({"hidden_size": 1024, "qkv_bias": True}, "bfloat16", "codes"),
        (QWEN2, "float16", ""),
        (LLAMA, "float32", ""),
        ({"hidden_size": 512, "inner": 1024}, "bfloat16", "fp8 blocks"),
        ({"qkv_bias": True}, "bfloat16", "fp8 rows"),
        (COHERE2, "bfloat16", ""),
        (BLOOM, "bfloat16", ""),
    )
] + [
    (cast(DenseConfig, read_config(raw, "a test")), dtype, "")
    for raw, dtype in ((QWEN35, "bfloat16"), (QWEN35, "float32"), (GLM_LITE, "bfloat16"), (V2_LITE, "float32"))
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
    torch.mm = torch.addmm = torch.bmm = lambda *_, out: out  # type: ignore[assignment]
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


class ZeroWeights:
    """Stands for a checkpoint whose layers have nothing but zeros, as codes or as 8-bit floats; the rest is floats."""

    def __init__(self, config: DenseConfig, form: str) -> None:
        spec, inner, self.config = config.attention(), config.layers[0].mlp.inner, config
        self.form = form
        self.shapes = {
            "qkv": (spec.q_size + 2 * spec.kv_size, config.hidden_size), "gate_up": (2 * inner, config.hidden_size),
            "output": (config.hidden_size, spec.q_size), "down": (config.hidden_size, inner),
        }  # fmt: skip

    def kept(self) -> dict[str, tuple[Any, ...]]:
        """What compilers are told of the matrices."""
        named = [(shape, name == "qkv" and self.config.qkv_bias, name == "gate_up") for name, shape in self.shapes.items()]
        if self.form == "codes":
            return {"packed": tuple(PackedShape(*shape, 4, 32, bias, gated) for shape, bias, gated in named)}
        return {"fp8": tuple(Fp8Shape(*shape, self._span(shape[1]), bias) for shape, bias, _ in named)}

    def _span(self, columns: int) -> int:
        return 128 if self.form == "fp8 blocks" and columns > 128 else columns

    def codes(self, name: str) -> PackedWeight | None:
        matrix = name.split(".")[-2]
        return quantize(torch.zeros(self.shapes[matrix]), 4, 32) if self.form == "codes" and matrix in self.shapes else None

    def codes_or_fp8(self, name: str, device: torch.device) -> PackedWeight | Fp8Matrix | None:
        shape = self.shapes.get(name.split(".")[-2])
        return self.codes(name) if self.form == "codes" or shape is None else zero_fp8(*shape, self._span(shape[1]), device)

    def shape(self, name: str) -> tuple[int, int]:
        return self.config.vocab_size, self.config.hidden_size

    def copy(self, name: str, target: torch.Tensor) -> None:
        pass


def build_runner(config: DenseConfig, dtype: str, codes: ZeroWeights | None) -> tuple[ModelRunner, Graph]:
    scheme = Packed() if codes else None
    model = build_model(config, getattr(torch, dtype), TritonBackend, NullComm(), LENGTH, scheme)  # type: ignore[arg-type]
    if codes:
        load_packed(model, codes)  # type: ignore[arg-type]
    specs = cache_specs(config, dtype)
    table = RequestTable(ROWS, RowLayout(LENGTH // SIZE, LENGTH + 1, has_states=any(spec.state for spec in specs)), CPU)
    store = PagedStore(specs, 40, SIZE, CPU, num_states=2)
    caches = [cache | state for cache, state in zip(store.caches, store.states, strict=True)]
    eager = Eager(model, lambda _: TritonBackend, caches, table, SIZE, TOKENS)  # type: ignore[arg-type]
    if config.attention().latent is None:
        eager.teams = StepTeams(1, ROWS, 16, 8, CPU)
    assert eager.sharing is not None
    eager.sharing.share_all()
    graph = Graph(eager, ROWS, TOKENS, CAPTURED)
    return ModelRunner(graph, ops, store, table, None), graph


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
    crowd = [*range(8, ROWS)]  # they read their first three blocks in teams
    writes = [RowWrite(row, row, prompt, 599, 0, [[1, 2, 3]], SamplingParams(temperature=0), (1,), [], noise, b"") for row in crowd]
    own = [(row, 0, 3, 10 + row) for row in crowd]
    count = len(crowd)
    made.append(StepPlan(1, crowd, crowd, [50] * count, [1] * count, [True] * count, row_writes=writes, new_blocks=own))
    made.append(StepPlan(1, copies=[(1, 2)], row_forks=[RowFork(7, 1, 7, noise)]))
    made.append(StepPlan(1, [7], [7], [90], [1], [True], copies=[(1, 2), (2, 3)]))
    return made


def needless(names: set[str]) -> set[str]:
    """Experts are compiled for larger steps, too."""
    return {name for name in names if ".moe." not in name}


def main(capability: int) -> None:
    fp8.by_torch = lambda values, scale, weight, bias, rows: torch.zeros(rows, len(weight), **BF16)  # type: ignore[assignment]
    for config, dtype, form in MODELS:
        codes = ZeroWeights(config, form) if form else None
        shapes = kernel_shapes(describe(config), kept=[])
        assert shapes is not None
        shapes = replace(shapes, **codes.kept() if codes else {})
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
            if any(spec.state for spec in cache_specs(config, dtype)):
                plan.states = [(0, 1)] * len(plan.row)
                plan.checkpoints = [(entry, 9, 1) for entry, count in enumerate(plan.num_query) if count > 9 and not plan.start[entry]]
            runner.forward(plan)
            runner.sample()
        for word, names in {"missing": warm - ahead, "needless": set() if form else needless(ahead - warm), "late": met - warm}.items():
            print("".join(f"{word} {name}\n" for name in sorted(names)), end="")


if __name__ == "__main__":
    main(int(sys.argv[1]))
