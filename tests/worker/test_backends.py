"""A backend is chosen for each kind of layer by what it supports, and a model whose layers have different ones computes the same."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.attention.backend import import_backend
from octavo.attention.capabilities import BACKENDS, CPU, INVARIANT, PREFERRED, TRITON, Capabilities, Device
from octavo.attention.cpu import CpuBackend
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.attention.triton import TritonBackend
from octavo.config import AttentionBackendName, Debug, EngineConfig
from octavo.engine.verify import verify
from octavo.errors import ConfigError
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.model_config import RopeConfig
from octavo.models.description import ModelDescription
from octavo.models.registry import describe, read_config
from octavo.sizing.auto import resolved
from octavo.worker import facts
from octavo.worker.backends import Backends, Kind, Run, choose_backends
from tests.loading.test_sharded import raw_config
from tests.support.families import FAMILIES, family_model
from tests.support.models import tiny_model

SPEC = AttentionSpec(4, 2, 64, 0.125, rope=RopeConfig())
ON_CPU, ON_GPU = EngineConfig(device="cpu"), EngineConfig(device="cuda")
NAMED = "leave attention_backend at auto"


def model_of(*specs: AttentionSpec) -> ModelDescription:
    """A model whose layers have these mixers."""
    model = describe(read_config(raw_config("Llama"), "test"))
    return replace(model, layers=tuple(replace(model.layers[0], mixer=spec) for spec in specs))


def choose(device: Device, dtype: str, *specs: AttentionSpec, references: bool = False, **asked: Any) -> list[tuple[str, tuple[int, ...]]]:
    config = resolved(EngineConfig(**asked), device)
    choices = choose_backends(Run(config, dtype, device, references), model_of(*specs))
    return [(choice.backend.name, choice.layers) for choice in choices]


# promise: attention-backend
@pytest.mark.parametrize(
    ("device", "dtype", "spec", "asked", "name"),
    [
        ("cpu", "float32", {"window": 5, "sinks": True, "rope": None}, {}, "cpu"),
        ("cpu", "bfloat16", {"head_dim": 20}, {"kv_cache_dtype": "int8"}, "cpu"),
        ("cpu", "float32", {}, {"attention_backend": "triton", "kv_cache_layout": "hnd"}, "triton"),
        ("cpu", "float32", {}, {"attention_backend": "contiguous", "enable_prefix_caching": False}, "contiguous"),
        ("cuda", "bfloat16", {"window": 5, "sinks": True, "soft_cap": 3.0}, {}, "triton"),
        ("cuda", "float32", {"head_dim": 256}, {"kv_cache_layout": "hnd", "kv_cache_dtype": "float32"}, "triton"),
        ("cuda", "float16", {"head_dim": 128, "window": 5}, {"attention_backend": "flashinfer", "kv_cache_layout": "hnd"}, "flashinfer"),
        ("cuda", "float16", {"sinks": True}, {"attention_backend": "contiguous", "enable_prefix_caching": False}, "contiguous"),
        ("cuda", "bfloat16", {"window": 5}, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "triton"),
    ],
)
def test_a_backend_is_chosen_that_supports_the_settings_and_the_layers(
    device: Device, dtype: str, spec: dict[str, Any], asked: dict[str, Any], name: str
) -> None:
    assert choose(device, dtype, replace(SPEC, **spec), **asked) == [(name, (0,))]


@pytest.mark.parametrize(("deterministic", "expected"), [(True, INVARIANT), (False, TRITON)])
def test_deterministic_chooses_the_backend_whose_rows_do_not_depend_on_others(deterministic: bool, expected: Capabilities) -> None:
    for name in ("auto", "triton"):
        config = resolved(EngineConfig(deterministic=deterministic, attention_backend=name), "cuda")
        (choice,) = choose_backends(Run(config, "bfloat16", "cuda"), model_of(SPEC))
        assert choice.backend is expected and choice.backend.deterministic == deterministic


# promise: deterministic
def test_what_is_not_deterministic_is_refused_by_name(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "model", "LlamaForCausalLM", seed=1))
    LLM(folder, deterministic=True, device="cpu", skip_tokenizer_init=True).close()
    with pytest.raises(ConfigError, match="deterministic is True, and torch computes, whose sums depend on the other rows"):
        LLM(folder, deterministic=True, device="cpu", native=False, skip_tokenizer_init=True)


# promise: attention-backend
@pytest.mark.parametrize(
    ("device", "dtype", "spec", "asked", "said"),
    [
        ("cpu", "float32", {"alibi": True}, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
         "layer 1 needs alibi, and decode_context_parallel_size is 2: set it to 1"),
        ("cuda", "bfloat16", {"sinks": True}, {"attention_backend": "flashinfer"},
         f"layer 1 needs sinks, which attention backend flashinfer does not support: {NAMED}"),
        ("cuda", "bfloat16", {"head_dim": 80}, {"attention_backend": "flashinfer"},
         f"layer 1 has heads of 80, and attention backend flashinfer has only 64, 128, 256: {NAMED}"),
        ("cuda", "bfloat16", {"head_dim": 20}, {},
         "layer 1 has heads of 20, and attention backend triton has only multiples of 16 up to 256: set device to cpu"),
        ("cuda", "float32", {}, {"attention_backend": "flashinfer"},
         f"dtype is float32, and attention backend flashinfer has only float16, bfloat16: set dtype to one of these, or {NAMED}"),
        ("cuda", "bfloat16", {}, {"attention_backend": "flashinfer", "deterministic": True},
         f"deterministic is True, and attention backend flashinfer computes a row differently beside others: {NAMED}"),
        ("cpu", "float32", {}, {"attention_backend": "flashinfer"},
         "attention_backend is flashinfer, which runs on a GPU, and this runs on a CPU: set it to auto, or device to cuda"),
        ("cuda", "float32", {}, {"attention_backend": "cpu"},
         "attention_backend is cpu, which runs on a CPU, and this runs on a GPU: set it to auto, or device to cpu"),
        ("cuda", "bfloat16", {}, {"kv_cache_dtype": "int8"},
         "kv_cache_dtype is int8, dtype is bfloat16, and attention backend triton keeps the KV cache in the dtype of the run: "
         "leave kv_cache_dtype at auto, or set device to cpu"),
        ("cpu", "float32", {}, {"kv_cache_layout": "hnd"},
         "kv_cache_layout is hnd, and attention backend cpu has only nhd: leave kv_cache_layout at auto"),
        ("cpu", "float32", {}, {"attention_backend": "contiguous"},
         "enable_prefix_caching is True, and attention backend contiguous shares no blocks: "
         f"set enable_prefix_caching=False (--no-enable-prefix-caching), or {NAMED}"),
        ("cuda", "bfloat16", {"soft_cap": 3.0}, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
         "layer 1 needs soft_cap, and decode_context_parallel_size is 2: set it to 1"),
        ("cuda", "bfloat16", {}, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "attention_backend": "flashinfer"},
         "decode_context_parallel_size is 2, and attention backend flashinfer cannot attend to a part of a context: "
         f"set it to 1, or {NAMED}"),
    ],
)  # fmt: skip
def test_what_no_backend_supports_is_refused_with_the_reason_and_the_setting(
    device: Device, dtype: str, spec: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(device, dtype, SPEC, replace(SPEC, **spec), **asked)
    assert str(refused.value).replace("layer 0", "layer 1") == said


def test_reference_kernels_take_heads_of_any_size() -> None:
    assert choose("cuda", "float32", replace(SPEC, head_dim=20), references=True) == [("triton", (0,))]


def test_records_are_those_of_the_classes_and_of_the_setting_and_need_no_torch() -> None:
    assert all(import_backend(each).capabilities is each for each in BACKENDS if each.name != "flashinfer")
    names = AttentionBackendName.__args__  # type: ignore[attr-defined]
    assert set(names) == {"auto"} | {each.name for each in BACKENDS}
    assert all(each in BACKENDS and device in each.devices for device, every in PREFERRED.items() for each in every)
    program = "import sys; sys.modules['torch'] = None; import octavo.worker.backends"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_graphs_are_captured_as_far_as_all_backends_allow() -> None:
    made = [type("Made", (), {"capabilities": replace(TRITON, graphs=level)}) for level in ("every", "decode", "none")]
    kinds = [Kind("attention", frozenset(), size) for size in (16, 32, 64)]
    levels = [Backends(dict(zip(kinds, made[:count]))).graphs for count in (1, 2, 3)]  # type: ignore[arg-type]
    assert levels == ["every", "decode", "none"]


class PlainBackend(CpuBackend):
    """Lacks windows. What it prepares is not what `CpuBackend` prepares, so neither can read the other's."""

    capabilities: ClassVar[Capabilities] = replace(
        CPU, name="plain", implementation=f"{__name__}:PlainBackend", features=CPU.features - {"window"}
    )
    built: ClassVar[list[AttentionSpec]] = []

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.built.append(spec)

    @staticmethod
    def prepare(batch: ForwardBatch) -> Any:
        return {"plain": CpuBackend.prepare(batch)}

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        return super().attend(q, cache, replace(batch, attention=batch.attention["plain"]), out, sinks, slopes)


@pytest.fixture(params=["one cache group", "several"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A model in which some layers have a window."""
    if request.param == "several":
        return str(family_model(tmp_path / "model", FAMILIES["gemma3"], seed=5))
    return str(tiny_model(tmp_path / "model", "Qwen3ForCausalLM", seed=5, window=9, layers=3))


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(PREFERRED, "cpu", (PlainBackend.capabilities, CPU))
    yield
    PlainBackend.built.clear()


def answers(folder: str) -> list[Any]:
    """Prompts that share a prefix, in chunks."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
    prompts = [[*range(3, 43), last] for last in (50, 51, 52)]
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 80, "block_size": 4, "max_num_batched_tokens": 24}
    with LLM(folder, device="cpu", native=False, **settings) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(output.token_ids, output.logprobs) for output in outputs]


# promise: attention-backend
def test_layers_with_different_backends_compute_what_one_backend_computes(
    folder: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    alone = answers(folder)
    request.getfixturevalue("mixed")
    with caplog.at_level("INFO", "octavo"):
        assert answers(folder) == alone
    assert {spec.window for spec in PlainBackend.built} == {None}
    lines = sorted(line.partition("): ")[2] for line in caplog.messages if line.startswith("Attention backend"))
    assert lines[-1] == "plain" and re.fullmatch(r"cpu; layer [01] needs window, which attention backend plain does not support", lines[-2])


# promise: octavo-verify
def test_each_backend_of_a_mixed_model_is_verified(folder: str, mixed: None) -> None:
    source = resolve_model(folder)
    verified = verify(EngineConfig(model=folder, device="cpu", native=False, block_size=4), source, load_model_config(source), 1, 12)
    assert verified.compared.output_values > 0


class DecodeOnly(TritonBackend):
    capabilities: ClassVar[Capabilities] = replace(TRITON, implementation=f"{__name__}:DecodeOnly", graphs="decode")


def test_a_backend_that_captures_only_decode_steps_gets_no_other_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tiny_model(tmp_path / "model", "Qwen3ForCausalLM", seed=5))
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    monkeypatch.setitem(PREFERRED, "cuda", (DecodeOnly.capabilities,))
    with LLM(folder, skip_tokenizer_init=True, num_gpu_blocks_override=20, max_num_seqs=4) as llm:
        program = llm._core.executor.program  # type: ignore[attr-defined]
        assert len(program._decode) == 3 and not program._mixed
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2), use_tqdm=False)


def test_on_a_gpu_graphs_are_off_for_a_backend_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tiny_model(tmp_path / "model", "LlamaForCausalLM", seed=5))
    source = resolve_model(folder)
    monkeypatch.setattr(facts, "_choose_device", lambda _: "cuda")

    def graphs_off(level: str) -> bool:
        backend = type("Made", (TritonBackend,), {"capabilities": replace(TRITON, graphs=level)})
        monkeypatch.setattr(facts, "load_backends", lambda choices: Backends(dict.fromkeys([choice.kind for choice in choices], backend)))
        return facts.settle(EngineConfig(model=folder), source, load_model_config(source), Debug()).config.enforce_eager

    assert [graphs_off(level) for level in ("every", "decode", "none")] == [False, False, True]
