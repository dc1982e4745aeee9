"""What a plan says is what an engine takes; and memory that runs out ends in words that help."""

import json
import re
import resource
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from octavo import LLM, SamplingParams
from octavo.attention.cpu import CpuBackend
from octavo.attention.mixer import StepLoad
from octavo.cli.config_file import size
from octavo.comm.comm import NullComm
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kernels.ops import choose_experts
from octavo.layers import mlp
from octavo.loading.requantized import DummyCheckpoint
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.loading.shape import model_shape
from octavo.models.registry import build_model
from octavo.platforms import is_arm
from octavo.sizing.activations import step_bytes
from octavo.sizing.auto import resolved
from octavo.sizing.gpu_size import CONTEXT
from octavo.sizing.memory_plan import GIB, LIBRARIES, Memory, MemoryPlan, plan_memory
from octavo.worker import build as build_module
from octavo.worker import facts as facts_module
from octavo.worker import machine
from octavo.worker import memory as memory_module
from octavo.worker.device import Choice, Gpu
from octavo.worker.model_runner import ModelRunner
from tests.support.resident import held_under_load
from tests.support.soaked import one_in

shape_of = cache(model_shape)  # of the default model it takes a second


def plan_for(model: str | None, engine: dict[str, Any]) -> MemoryPlan:
    settings = engine.get("quantization", "auto"), engine.get("kv_cache_dtype", "auto")
    needs = shape_of(model).needs(engine["dtype"], *settings, native_threads=1 if engine.get("native") else 0)
    plan = plan_memory(needs, resolved(EngineConfig(**engine), "cpu"), Memory(16 * GIB))
    assert plan.refusal is None
    return plan


# Where the CPU does not multiply bfloat16, torch is slow in it and makes floats on the way, which no plan counts: `auto` never takes it.
OF_TORCH = list(dict.fromkeys(("float32", machine.fast_dtype(None))))


# promise: memory-plan-before
@pytest.mark.parametrize(
    ("dtype", "native", "quantization", "within"),
    [
        ("bfloat16", True, "auto", 0.05), pytest.param("bfloat16", True, "int4", 0.10, marks=pytest.mark.soak),
        *(pytest.param(dtype, native, kept, 0.05, marks=pytest.mark.soak)
          for dtype, native, kept in [*((dtype, False, "auto") for dtype in OF_TORCH),
                                      ("float16", True, "auto"), ("float32", True, "auto"), ("bfloat16", True, "none")]),
    ],
)  # fmt: skip
def test_the_default_model_takes_what_was_planned(dtype: str, native: bool, quantization: str, within: float) -> None:
    """Full steps, every row in use, every block written. While codes are quantised again, malloc keeps more or less back."""
    rows = 8 if native else 16  # for fewer, torch does not copy the vocabulary's matrix, which is planned
    engine = {"dtype": dtype, "native": native, "quantization": quantization, "num_gpu_blocks_override": 2 * rows + 1}
    engine |= {"max_num_seqs": rows, "max_num_batched_tokens": 16 * rows, "max_model_len": 33}
    load = {"model": None, "engine": engine, "vocab": 49152, "requests": rows, "prompt": 30, "tokens": 3}
    before, most = held_under_load(load)
    assert plan_for(None, engine).use.total - LIBRARIES == pytest.approx(most - before, rel=within)
    assert before == pytest.approx(LIBRARIES, rel=0.2), "what Python and the libraries take has changed"


# promise: memory-plan-before
@pytest.mark.soak
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_a_tiny_model_takes_what_was_planned_within_five_per_cent(stories: str, native: bool) -> None:
    engine = {"dtype": "float32", "native": native, "num_gpu_blocks_override": 257, "max_num_seqs": 8}
    engine |= {"max_num_batched_tokens": 256, "max_model_len": 512}
    before, most = held_under_load({"model": stories, "engine": engine, "vocab": 512, "requests": 8, "prompt": 504, "tokens": 8})
    assert plan_for(stories, engine).use.total - LIBRARIES + before == pytest.approx(most, rel=0.05)


# promise: enough-memory-one, out-memory-messages-point
def test_out_of_memory_at_start_says_what_is_needed_and_what_fits(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own complaint, and Python's, end in the plan's words; another RuntimeError stays what it is."""
    said = r"memory ran out at start \(.*\): this needs .*: weights 1\.0 MiB, KV cache .*the largest --max-model-len that fits is then \d+"
    monkeypatch.setattr(memory_module, "memory", lambda _: Memory(8 * GIB, others=GIB))
    monkeypatch.setattr(build_module, "load_weights", lambda *_: torch.empty(2**60))
    with pytest.raises(ConfigError, match=said):
        LLM(stories, native=False, kv_cache_memory_bytes=GIB)
    monkeypatch.setattr(build_module, "load_weights", lambda *_: bytearray(2**60))
    with pytest.raises(ConfigError, match=said):
        LLM(stories, native=False)
    monkeypatch.setattr(build_module, "load_weights", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        LLM(stories, native=False)


# promise: enough-memory-one
def test_what_was_taken_before_memory_ran_out_is_given_back_and_counts_as_nobodys(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref[Any]] = []

    def load(model: torch.nn.Module, _: object) -> None:
        built.extend(weakref.ref(one) for one in model.parameters())
        raise MemoryError

    def memory(_: object) -> Memory:
        assert built and not any(one() is not None for one in built), "weights are held that will count as another process's"
        return Memory(8 * GIB)

    monkeypatch.setattr(build_module, "load_weights", load)
    monkeypatch.setattr(memory_module, "memory", memory)
    said = r"of which \d\.\d\d GiB could not be allocated: lower --num-gpu-blocks-override to \d+ or less; the largest --max-model-len"
    with pytest.raises(ConfigError, match=said):
        LLM(stories, native=False, num_gpu_blocks_override=10**5)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    """One of that size, of which other processes leave so much; this one holds nothing there."""
    gpu = Gpu("NVIDIA H200", (9, 0), total, free)
    monkeypatch.setattr(facts_module, "device_here", lambda _: Choice("cuda", "as a test says", gpu))
    take_gpu(monkeypatch, gpu)


def take_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, reserved: int = 0, allocated: int = 0) -> None:
    monkeypatch.setattr(memory_module, "torch_gpu", lambda: (gpu, ""))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated)


H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 100 * GIB)
ON_GPU = (
    r"this needs [\d.]+ [GM]iB: weights [\d.]+ [GM]iB, KV cache [\d.]+ [GM]iB, activations [\d.]+ MiB, graphs [\d.]+ MiB, rows [\d.]+ MiB, "
    r"other 680\.0 MiB; this process may use 7\.20 GiB of the GPU's 8\.00 GiB \(--gpu-memory-utilization\), "
    r"of which other processes hold 2\.49 GiB"
)


# promise: enough-memory-one
def test_what_does_not_fit_on_a_gpu_is_refused_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, 8 * GIB, 5 * GIB)  # this process's own context is among what is held
    advice = r"lower --kv-cache-memory-bytes to \d+[kmg]( \([\d.]+ [MG]iB\))? or less; the largest --max-model-len that fits is then \d+"
    with pytest.raises(ConfigError, match=rf"^{ON_GPU}: {advice}"):
        LLM(device="cuda", kv_cache_memory_bytes=6 * GIB)


# promise: enough-memory-one
@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of", "Triton Error [CUDA]: out of memory",
        "CUDA error: out of memory\nCUDA kernel errors might", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)  # fmt: skip
def test_a_gpu_that_runs_out_at_start_says_what_is_needed_and_what_fits(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, 8 * GIB, 5 * GIB)
    needs, config = shape_of(None).needs("bfloat16", device="cuda"), resolved(EngineConfig(), "cuda")
    advice = r"set --kv-cache-memory-bytes to (\d+[kmg])(?: \([\d.]+ [MG]iB\))? or less; the largest --max-model-len that fits is then \d+$"
    shown = re.escape(" ".join(said.split()))
    with (
        pytest.raises(ConfigError, match=rf"^memory ran out at start \({shown}\): {ON_GPU}: {advice}") as refusal,
        memory_module.out_of_memory_explained(needs, config),
    ):
        raise RuntimeError(said)
    less = size(re.findall(advice, str(refusal.value))[0])
    smaller = plan_memory(needs, replace(config, kv_cache_memory_bytes=less), memory_module.memory(config))
    before = plan_memory(needs, config, memory_module.memory(config))
    assert smaller.refusal is None and smaller.use.total <= before.use.total * 3 // 4


# promise: memory-plan-before
def test_what_cannot_fit_beside_other_processes_is_refused_before_weights_load(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "load_weights", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setattr(facts_module, "memory", lambda _: Memory(8 * GIB, others=6 * GIB))
    said = r"KV cache 3\.00 GiB, .* may use 8\.00 GiB, of which other processes hold 6\.00 GiB: lower --kv-cache-memory-bytes to \d+"
    with pytest.raises(ConfigError, match=said):
        LLM(stories, kv_cache_memory_bytes=3 * GIB)


def test_free_memory_is_what_the_kernel_and_every_cgroup_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's file cache does not count as held, this process's own share does not count as others'."""
    status, info, group = tmp_path / "status", tmp_path / "meminfo", tmp_path / "group"
    status.write_text("VmSize:\t900 kB\nRssAnon:\t 200 kB\n")
    info.write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\n")
    group.mkdir()
    monkeypatch.setattr(memory_module, "OWN_STATUS", status)
    monkeypatch.setattr(machine, "MEMORY_INFO", info)
    monkeypatch.setattr(memory_module, "memory_bytes", lambda: 9000 * 1024)
    monkeypatch.setattr(memory_module, "groups", lambda _: [tmp_path, group])
    assert memory_module.host_memory().free == 5200 * 1024
    (group / "memory.max").write_text(str(4000 * 1024))
    (group / "memory.current").write_text(str(3000 * 1024))
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {500 * 1024}\nactive_file {100 * 1024}\n")
    assert memory_module.host_memory() == Memory(9000 * 1024, others=(9000 - 1800) * 1024)
    (group / "memory.max").write_text("max")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000 * 1024, 1000 * 1024))  # ulimit -v
    assert memory_module.host_memory().free == 300 * 1024
    status.write_text(f"RssAnon: {3 * 2**20} kB\n")  # with a model in this process that is no part of the next plan
    info.write_text(f"MemAvailable: {2**20} kB\n")
    monkeypatch.setattr(memory_module, "memory_bytes", lambda: 9 * GIB)
    assert memory_module.host_memory().free == GIB + LIBRARIES
    status.unlink(), info.unlink()
    assert memory_module.host_memory().free == 9 * GIB  # another system: all of it


# promise: gpu-memory-utilization
def test_free_memory_of_a_gpu_is_what_other_processes_leave_of_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's own context is no other's, and what torch keeps for later is free."""
    take_gpu(monkeypatch, H200, reserved=10 * GIB, allocated=7 * GIB)
    config = resolved(EngineConfig(gpu_memory_utilization=0.5), "cuda")
    assert memory_module.memory(config) == Memory(70 * GIB, others=37 * GIB - CONTEXT, gpu=140 * GIB)
    take_gpu(monkeypatch, replace(H200, free=140 * GIB))
    assert memory_module.memory(config).others == 0
    monkeypatch.setattr(memory_module, "torch_gpu", lambda: (None, "no driver"))
    with pytest.raises(ConfigError, match="the memory of the GPU could not be determined: no driver"):
        memory_module.memory(config)


# promise: memory-gpu-cpu
def test_memory_that_gpu_and_cpu_share_is_what_the_system_and_the_cgroup_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own count of what is free lacks the file cache, and knows no cgroup."""
    board, config = 61 * GIB, resolved(EngineConfig(), "cuda")
    take_gpu(monkeypatch, replace(H200, total=board, free=5 * GIB, unified=True), reserved=GIB, allocated=GIB // 2)
    monkeypatch.setattr(memory_module, "OWN_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory_module, "groups", lambda _: [tmp_path])
    monkeypatch.setattr(memory_module, "memory_bytes", lambda: board)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 50 * GIB)
    free = 50 * GIB + CONTEXT + GIB // 2
    assert memory_module.memory(config) == Memory(int(0.9 * board), others=board - free, gpu=board, unified=True)
    (tmp_path / "memory.max").write_text(str(8 * GIB))
    (tmp_path / "memory.current").write_text(str(2 * GIB))
    monkeypatch.setattr(memory_module, "memory_bytes", lambda: 8 * GIB)
    free = 6 * GIB + CONTEXT + GIB // 2
    assert memory_module.memory(config) == Memory(int(0.9 * 8 * GIB), others=8 * GIB - free, gpu=8 * GIB, unified=True)
    needs = shape_of(None).needs("bfloat16", device="cuda")
    said = plan_memory(needs, replace(config, kv_cache_memory_bytes=7 * GIB), memory_module.memory(config)).refusal or ""
    assert "GPU and CPU share 8.00 GiB of memory, of which this process may use 7.20 GiB (--gpu-memory-utilization), of which other" in said


# -- activations, tensor by tensor

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def write_folder(path: Path, config: dict[str, Any]) -> str:
    """Writes a folder with random weights. Returns its path."""
    (path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        empty = build_model(load_model_config(resolve_model(str(path))), torch.float32, CpuBackend, NullComm(), max_len=1)
    weights = DummyCheckpoint(empty, seed=0)
    save_file({name: weights.read(name).clone().bfloat16() for name in weights.names()}, path / "model.safetensors")
    return str(path)


EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1}
MIXTURE = SMALL | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_hidden_layers": 12, "mlp_only_layers": []}
GEMMA = SMALL | {
    "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 12, "sliding_window": 64, "sliding_window_pattern": 3,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32, "intermediate_size": 2048, "hidden_size": 512,
}  # fmt: skip
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 8, "intermediate_size": 64, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
LATENTS = SMALL | LATENT | {"num_hidden_layers": 12, "n_routed_experts": 8, "moe_intermediate_size": 512, "kv_lora_rank": 512}
LARGER = {"hidden_size": 1024, "num_hidden_layers": 8}


# promise: memory-plan-before
@pytest.mark.soak
@pytest.mark.parametrize(
    ("config", "native"),
    [
        pytest.param(MIXTURE, True, id="mixture"), pytest.param(GEMMA, True, id="two groups", marks=pytest.mark.soak),
        pytest.param(MIXTURE, False, id="mixture in torch", marks=pytest.mark.soak),
        pytest.param(GEMMA, False, id="two groups in torch", marks=pytest.mark.soak),
        pytest.param(LATENTS, True, id="latents", marks=pytest.mark.soak),
        pytest.param(LATENTS, False, id="latents in torch", marks=pytest.mark.soak),
        pytest.param(MIXTURE | LARGER, True, id="larger mixture", marks=pytest.mark.soak),
        pytest.param(GEMMA | LARGER | {"num_hidden_layers": 24}, True, id="larger, two groups", marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_mixtures_and_models_with_two_groups_take_what_was_planned(config: dict[str, Any], native: bool, tmp_path: Path) -> None:
    """The pool is written to its end, and weights are nearly all of the rest: what steps take is counted below."""
    one_group = "sliding_window" not in config
    model, dtype, length = write_folder(tmp_path, config), "bfloat16" if native else "float32", 257 if one_group else 129
    blocks = length if one_group else 3 * length - 2  # what 16 sequences fill, in one group or in two
    engine = {"dtype": dtype, "native": native, "num_gpu_blocks_override": blocks, "max_num_seqs": 16}
    engine |= {"max_num_batched_tokens": 64, "max_model_len": length, "skip_tokenizer_init": True}
    before, most = held_under_load({"model": model, "engine": engine, "vocab": 512, "requests": 16, "prompt": length - 2, "tokens": 2})
    assert plan_for(model, engine).use.total - LIBRARIES == pytest.approx(most - before, rel=0.05)


# promise: kv-cache-dtype
@pytest.mark.soak
def test_a_pool_of_codes_holds_nearly_twice_the_tokens_and_takes_what_was_planned(tmp_path: Path) -> None:
    """Heads of 64 dimensions: 64 + 4 bytes instead of 128. The pool is nearly all that this engine takes, and is written to the end."""
    wide = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
    model = write_folder(tmp_path, SMALL | wide | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64})
    engine = {"dtype": "bfloat16", "native": True, "max_num_seqs": 24, "max_num_batched_tokens": 64}
    engine |= {"kv_cache_memory_bytes": 2**28, "max_model_len": 257, "skip_tokenizer_init": True}
    codes = engine | {"kv_cache_dtype": "int8"}
    assert plan_for(model, codes).geometry.num_blocks / plan_for(model, engine).geometry.num_blocks == pytest.approx(128 / 68, rel=0.001)
    codes["num_gpu_blocks_override"] = 24 * 16 + 1
    before, most = held_under_load({"model": model, "engine": codes, "vocab": 512, "requests": 24, "prompt": 255, "tokens": 2})
    assert plan_for(model, codes).use.total - LIBRARIES == pytest.approx(most - before, rel=0.05)


# What is largest: how the model differs, prompts, tokens of a prompt, tokens of an answer, tokens of a step, how rows are sampled
STEPS: dict[str, tuple[dict[str, Any], int, int, int, int, dict[str, Any]]] = {
    "the MLP": ({}, 1, 1024, 1, 1024, {}),
    "rotation": ({"intermediate_size": 64}, 1, 2048, 1, 2048, {}),
    "normed heads": ({"intermediate_size": 64, "architectures": ["Qwen3ForCausalLM"]}, 1, 2048, 1, 2048, {}),
    "a mask": ({}, 1, 4096, 1, 1024, {}),
    "gathered keys": ({"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 8}, 16, 200, 4, 16, {}),
    "gathered codes": ({"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 8}, 16, 200, 4, 16, {}),
    "capped scores": ({"intermediate_size": 64, "architectures": ["Gemma2ForCausalLM"], "sliding_window": 8192}, 1, 1024, 1, 1024, {}),
    "parallel sub-layers": ({"architectures": ["CohereForCausalLM"]}, 1, 1024, 1, 1024, {}),
    "sloped scores": ({"intermediate_size": 64, "architectures": ["BloomForCausalLM"], "head_dim": None}, 1, 1024, 1, 1024, {}),
    "latents of a prompt": (LATENT, 1, 1024, 1, 1024, {}),
    "gathered latents": (LATENT | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}, 16, 200, 4, 16, {}),
    "no gate": ({"intermediate_size": 2048, "architectures": ["BloomForCausalLM"], "head_dim": None}, 16, 64, 1, 1024, {}),
    "one expert": (EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": []}, 1, 1024, 1, 1024, {}),
    "the sampler": ({"vocab_size": 50_000}, 24, 8, 2, 256, {"temperature": 0.001, "top_p": 0.9}),
}

STEPS_AND_DTYPES = one_in(5, ((step, dtype) for dtype in OF_TORCH for step in STEPS))
OF_THE_SAMPLER = [("the sampler", "bfloat16")] if "bfloat16" not in OF_TORCH else []


def peak_bytes(run: Any) -> int:
    """The most bytes of tensors alive at once that were made in `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    changes = [(event.start_ns(), event.nbytes()) for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


@pytest.mark.parametrize(("largest", "dtype"), [*STEPS_AND_DTYPES, *OF_THE_SAMPLER])
def test_a_step_holds_what_was_counted(largest: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, requests, prompt, tokens, step, sampling = STEPS[largest]
    cache: Any = "int8" if largest == "gathered codes" else "auto"
    (tmp_path / "config.json").write_text(json.dumps(SMALL | fields))
    forward, sample = ModelRunner.forward, ModelRunner.sample
    if largest == "one expert":  # every token chooses the same ones
        monkeypatch.setattr(mlp, "choose_experts", lambda logits, *form: choose_experts(logits * 0 + torch.arange(16), *form))
    peaks: list[int] = []
    watched: list[bool] = []

    def watched_forward(self: ModelRunner, plan: Any) -> None:
        full = len(plan.row) == requests and sum(plan.start) + sum(plan.num_query) > 0.65 * requests * prompt
        watched.append(full)  # what is smaller cannot be what is largest, and to look at it takes longer than the step
        if not full:
            return forward(self, plan)
        held = self._forward.logits.nbytes  # of the step before: they stay until the next are there
        peaks.append(held + peak_bytes(lambda: forward(self, plan)))

    def watched_sample(self: ModelRunner, masks: Any = None) -> Any:
        if not watched[-1]:
            return sample(self, masks)
        results: list[Any] = []
        peaks.append(self._forward.logits.nbytes + peak_bytes(lambda: results.append(sample(self, masks))))
        return results[0]

    length = prompt + tokens
    with LLM(
        str(tmp_path), load_format="dummy", native=False, skip_tokenizer_init=True, dtype=dtype, max_num_seqs=requests,  # type: ignore[arg-type]
        max_num_batched_tokens=step, kv_cache_dtype=cache, num_gpu_blocks_override=requests * (length // 16 + 2) + 2,
    ) as llm:  # fmt: skip
        monkeypatch.setattr(ModelRunner, "forward", watched_forward)
        monkeypatch.setattr(ModelRunner, "sample", watched_sample)
        params = SamplingParams(**{"temperature": 0, **sampling}, max_tokens=tokens, ignore_eos=True)
        llm.generate([[(7 * i + j) % 500 for j in range(prompt)] for i in range(requests)], params, use_tqdm=False)
    shape = model_shape(str(tmp_path))
    context = prompt if largest in ("a mask", "capped scores", "sloped scores", "latents of a prompt") else 1
    load = StepLoad(min(step, requests * prompt), requests, context, requests * length)
    head = torch.empty(shape.model.vocab_size, shape.model.hidden_size)
    copied = peak_bytes(lambda: torch.nn.functional.linear(head[:requests], head)) > head.nbytes  # not if room is left of an earlier one
    counted = step_bytes(shape.model, dtype, shape.needs(dtype, kv_cache_dtype=cache).kv_cache_dtype, load, is_arm() and copied)
    assert counted == pytest.approx(max(peaks), rel=0.05)
