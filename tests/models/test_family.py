"""A family from outside the package: once it is registered it loads, plans its memory and runs; programs that cannot run it are off.

Its layers are unlike any shipped one: attention and MLP in parallel after one LayerNorm, heads and caches that differ by layer.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo import LLM, SamplingParams
from octavo.attention.backend import AttentionBackend, load_backend
from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.config import EngineConfig
from octavo.kernels.reference.layer import rotate
from octavo.layers.attention import Attention, build_rope
from octavo.layers.comm import Comm, NullComm
from octavo.layers.linear import Linear, RowParallelLinear
from octavo.loading.loader import weight_targets
from octavo.loading.shape import model_shape
from octavo.model_config import ConfigReader, ModelConfig, RopeConfig
from octavo.models.decoder import Decoder
from octavo.models.dense_family import FAMILY as DENSE
from octavo.models.family import FAMILIES, Family, Rule, Rules, register, vector
from octavo.models.registry import build_model, describe, read_config
from octavo.policy.auto import resolved, suited
from octavo.policy.description import LayerShape, MLPShape, ModelDescription, NormShape
from octavo.policy.memory_plan import GIB, Memory, plan_memory
from octavo.quant.schemes import UNQUANTIZED, QuantScheme, empty_parameter

RULES = Rules(
    [
        Rule("wte", "embed"),
        Rule("h.*.ln", "layers.*.norm"),
        *(Rule(f"h.*.attn.{part}", "layers.*.mixer.qkv", part) for part in "qkv"),
        Rule("h.*.attn.out", "layers.*.mixer.output"),
        Rule("h.*.mlp.fc", "layers.*.fc"),
        Rule("h.*.mlp.proj", "layers.*.proj"),
        Rule("ln_f", "norm"),
    ]
)
EPS, INNER, SPECS = 1e-5, 48, ((4, 2, 16, None), (2, 1, 32, 5))  # heads, KV heads, head_dim and window, in turn
RAW = {"architectures": ["ParallelForTest"], "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "tie_word_embeddings": True,
       "max_position_embeddings": 128, "dtype": "float32"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(ModelConfig):
    def spec(self, layer: int) -> AttentionSpec:
        heads, kv_heads, head_dim, window = SPECS[layer % 2]
        return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, window, RopeConfig())


def read(reader: ConfigReader, architecture: str) -> ParallelConfig:
    return ParallelConfig(**reader.common(architecture))


def describe_parallel(config: ParallelConfig) -> ModelDescription:
    hidden, layers, norm = config.hidden_size, range(config.num_layers), NormShape(EPS, "layer")
    matrices = []
    for layer in layers:
        spec = config.spec(layer)
        matrices += [
            RULES.matrix("qkv", "layers.*.mixer.qkv", spec.projections, hidden, layer, split="rows"),
            RULES.matrix("output", "layers.*.mixer.output", hidden, spec.q_size, layer, split="columns"),
            RULES.matrix("fc", "layers.*.fc", INNER, hidden, layer, bias=True, split="rows"),
            RULES.matrix("proj", "layers.*.proj", hidden, INNER, layer, bias=True, split="columns"),
        ]
    return ModelDescription(
        family="parallel", vocab_size=config.vocab_size, hidden_size=hidden, max_position=config.max_position, norm=norm,
        layers=tuple(LayerShape(config.spec(layer), MLPShape(INNER, "gelu"), norm, parallel=True) for layer in layers),
        matrices=(*matrices, RULES.matrix("head", "embed", config.vocab_size, hidden, vocabulary=True)),
        vectors=tuple(vector("norm", f"{place}norm", hidden, bias=True) for place in [*(f"layers.{layer}." for layer in layers), ""]),
    )  # fmt: skip


class LayerNorm(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = empty_parameter(size, dtype=dtype), empty_parameter(size, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return F.layer_norm(stream, (stream.shape[1],), self.weight, self.bias, EPS), stream


class ParallelLayer(nn.Module):
    def __init__(
        self, config: ParallelConfig, layer: int, max_len: int, backend: type[AttentionBackend], scheme: QuantScheme, dtype: torch.dtype,
        comm: Comm,
    ) -> None:  # fmt: skip
        super().__init__()
        spec, hidden = config.spec(layer), config.hidden_size
        assert spec.rope is not None
        rope = build_rope(spec.rope, spec.head_dim, max_len)
        self.layer, self.norm = layer, LayerNorm(hidden, dtype)
        self.mixer = Attention(spec, hidden, (False, False), EPS, rope, backend, scheme, dtype, comm)
        self.fc = Linear(hidden, INNER, True, scheme, dtype)
        self.proj = RowParallelLinear(INNER, hidden, True, scheme, dtype, comm)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, stream = self.norm(x, residual)
        mixed = self.mixer(x, batch.caches[self.layer], batch)
        return self.mixer.output(mixed) + self.proj(F.gelu(self.fc(x))), stream

    def sampled(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        x, stream = self(x, residual, batch)
        return x[batch.sample_index], stream[batch.sample_index], x


class ParallelModel(Decoder):
    def __init__(
        self, config: ParallelConfig, dtype: torch.dtype, backend: type[AttentionBackend], comm: Comm, max_len: int,
        scheme: QuantScheme = UNQUANTIZED,
    ) -> None:  # fmt: skip
        layers = [ParallelLayer(config, layer, max_len, backend, scheme, dtype, comm) for layer in range(config.num_layers)]
        super().__init__(config, layers, LayerNorm(config.hidden_size, dtype), scheme, dtype, comm)


PARALLEL = Family("parallel", ("ParallelForTest",), f"{__name__}:ParallelModel", RULES, read, describe_parallel)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[dict[str, Tensor]]:
    """Of a model in the folder of the test, its family registered."""
    register(PARALLEL)
    config, generator = read_config(RAW, "a test"), torch.Generator().manual_seed(3)
    with torch.device("meta"):
        empty = build_model(config, torch.float32, load_backend("cpu"), NullComm(), max_len=1)
    shapes = {name: target.values.shape for name, target in weight_targets(empty).items()}
    made = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    yield made
    del FAMILIES["ParallelForTest"]


def reference_logits(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Of the whole sequence at once, in plain torch: no cache, no module of the engine but the rotation."""
    x = weights["wte.weight"][ids]
    count = len(ids)
    for layer in range(RAW["num_hidden_layers"]):  # type: ignore[call-overload]
        of = {name.removeprefix(f"h.{layer}."): value for name, value in weights.items() if name.startswith(f"h.{layer}.")}
        heads, kv_heads, dim, window = SPECS[layer % 2]
        rope = build_rope(RopeConfig(), dim, count)
        y = F.layer_norm(x, (x.shape[1],), of["ln.weight"], of["ln.bias"], EPS)
        q, k, v = ((y @ of[f"attn.{part}.weight"].T).view(count, -1, dim) for part in "qkv")
        q, k = rotate(q, rope.cos, rope.sin), rotate(k, rope.cos, rope.sin)
        k, v = k.repeat_interleave(heads // kv_heads, 1), v.repeat_interleave(heads // kv_heads, 1)
        back = torch.arange(count)[:, None] - torch.arange(count)
        seen = (back >= 0) & (back < (window or count))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)
        mlp = F.gelu(y @ of["mlp.fc.weight"].T + of["mlp.fc.bias"]) @ of["mlp.proj.weight"].T + of["mlp.proj.bias"]
        x = x + mixed @ of["attn.out.weight"].T + mlp
    x = F.layer_norm(x, (x.shape[1],), weights["ln_f.weight"], weights["ln_f.bias"], EPS)
    return x @ weights["wte.weight"].T


def test_it_loads_and_computes_what_plain_torch_does(
    weights: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    prompts = [[5, 7, 11, 13, 17, 19, 23, 29, 31, 37], [3, 1, 4, 1, 5]]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=1)
    with caplog.at_level("INFO"), LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, block_size=4, max_num_batched_tokens=8) as llm:
        answers = [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]
    assert "Native kernels are off for this model, torch computes: layer 0 computes its mixer and its MLP in parallel" in caplog.text
    for prompt, answer in zip(prompts, answers):
        logprobs = reference_logits(weights, [*prompt, *answer.token_ids]).log_softmax(-1)[len(prompt) - 1 : -1]
        assert list(answer.token_ids) == logprobs.argmax(-1).tolist()
        assert answer.cumulative_logprob == pytest.approx(float(logprobs.max(-1).values.sum()), abs=1e-3)


def test_its_memory_is_planned_from_the_description(weights: dict[str, Tensor], tmp_path: Path) -> None:
    shape = model_shape(str(tmp_path))
    needs = shape.needs("float32")
    assert needs.weights == 4 * sum(weight.numel() for weight in weights.values())
    assert [spec.window for spec in needs.specs] == [None, 5, None] and needs.bytes_per_token == 4 * 2 * (2 * 32 + 32)
    codes = model_shape(str(tmp_path)).needs("float32", kv_cache_dtype="int8").specs
    assert [spec.buffers["k"].shape for spec in codes] == [(2, 16), (1, 32), (2, 16)] and codes[1].buffers["v_scale"].shape == (1,)
    assert plan_memory(needs, resolved(EngineConfig(), "cpu"), Memory(8 * GIB)).refusal is None


def test_programs_that_cannot_run_a_model_are_turned_off_by_what_it_is_made_of(weights: dict[str, Tensor], tmp_path: Path) -> None:
    model, dense = model_shape(str(tmp_path)).model, describe(dense_config())
    for device, setting, off in (("cpu", "native", False), ("cuda", "enforce_eager", True)):
        config = resolved(EngineConfig(), device)  # type: ignore[arg-type]
        assert getattr(suited(config, model), setting) is off and suited(config, dense) == config
    layer = dense.layers[0]
    mixer: Any = layer.mixer
    for other in (
        replace(layer, parallel=True), replace(layer, norm=replace(layer.norm, kind="layer")), replace(layer, mlp=MLPShape(8, "gelu")),
        replace(layer, mixer=replace(mixer, soft_cap=30.0)), replace(layer, mixer=replace(mixer, rope=None)),
    ):  # fmt: skip
        assert not suited(resolved(EngineConfig(), "cpu"), replace(dense, layers=(other, other))).native
    mixed = replace(dense, layers=(layer, replace(layer, mlp=MLPShape(8))))
    assert not suited(resolved(EngineConfig(), "cpu"), mixed).native
    windowed = replace(dense, layers=(layer, replace(layer, mixer=replace(mixer, window=4))))
    assert suited(resolved(EngineConfig(), "cpu"), windowed).native


def dense_config(**fields: object) -> ModelConfig:
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return read_config({"architectures": ["Qwen3ForCausalLM"], **shape, "num_key_value_heads": 2, "attention_bias": True, **fields}, "test")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", DENSE.architectures)
def test_the_description_names_every_parameter_of_the_module(architecture: str, tied: bool) -> None:
    config = dense_config(architectures=[architecture], tie_word_embeddings=tied, mlp_bias=True)
    with torch.device("meta"):
        model = build_model(config, torch.float32, load_backend("cpu"), NullComm(), max_len=1)
    described = describe(config)
    matrices = [*described.matrices, *([described.lookup] if described.lookup else [])]
    shapes: dict[str, tuple[int, ...]] = {f"{one.module}.weight": (one.rows, one.columns) for one in matrices}
    shapes |= {f"{one.module}.bias": (one.rows,) for one in matrices if one.bias}
    shapes |= {f"{one.module}.weight": (one.size,) for one in described.vectors}
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == shapes
    norms = {f"{DENSE.rules.checkpoint_module(one.module)}.weight" for one in described.vectors}
    assert norms | {part for one in matrices for part in one.parts} == {name for name in weight_targets(model) if name.endswith(".weight")}
    summed = {name for name, module in model.named_modules() if isinstance(module, RowParallelLinear)}
    assert {one.module for one in matrices if one.split == "columns"} == summed


def test_rules_may_have_several_numbers_and_know_gguf_names() -> None:
    rules = Rules([Rule("model.layers.*.mlp.experts.*.up", "layers.*.experts.*.gate_up", "up", gguf="blk.*.ffn_up.*")])
    assert rules.checkpoint_module("layers.3.experts.14.gate_up", "up") == "model.layers.3.mlp.experts.14.up"
    assert rules.of_gguf("blk.3.ffn_up.14.weight") == "model.layers.3.mlp.experts.14.up.weight"
    assert rules.find("layers.3.experts.14.gate_up", "gate") is None
    assert DENSE.rules.of_gguf("blk.12.attn_k.bias") == "model.layers.12.self_attn.k_proj.bias"
    assert [DENSE.rules.of_gguf(name) for name in ("blk.1.ffn_gate_inp.weight", "rope_freqs.weight", "blk.1.attn_k.scale")] == [None] * 3
