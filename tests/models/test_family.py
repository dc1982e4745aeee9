"""A family from outside the package: once it is registered it loads, plans its memory and runs; programs that cannot run it are off.

Its layers are unlike any shipped one: attention and MLP in parallel after one LayerNorm, heads that differ by layer, and two cache groups:
a full one, and one with a window that gives back what lies behind it.
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
from octavo.comm.comm import Comm, NullComm
from octavo.config import EngineConfig
from octavo.engine.verify import Verified, verify
from octavo.errors import ConfigError, VerifyError
from octavo.kernels.reference.layer import rotate
from octavo.layers.attention import Attention, build_rope
from octavo.layers.linear import Linear, RMSNorm, RowParallelLinear
from octavo.loading.loader import weight_targets
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.loading.shape import model_shape
from octavo.messages import StepPlan
from octavo.model_config import ConfigReader, ModelConfig, RopeConfig
from octavo.models.decoder import Decoder
from octavo.models.description import Experts, LayerShape, MLPShape, ModelDescription, NormShape
from octavo.models.family import FAMILIES, Family, Rule, Rules, register, vector
from octavo.models.llama_family import FAMILY as LLAMA
from octavo.models.registry import build_model, describe, family_of, read_config
from octavo.policy.block_pool import NULL_BLOCK
from octavo.policy.cache_group import CacheGroup, WindowGroup
from octavo.quant.schemes import UNQUANTIZED, QuantScheme, empty_parameter
from octavo.sizing.auto import resolved, suited
from octavo.sizing.gpu_size import graph_refusal
from octavo.sizing.memory_plan import GIB, Memory, plan_memory
from octavo.worker.request_table import RequestTable

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
EPS, INNER = 1e-5, 48
HEADS = ((4, 2, None), (2, 1, 5))  # heads, KV heads and window, in turn
RAW = {"architectures": ["ParallelForTest"], "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "tie_word_embeddings": True,
       "max_position_embeddings": 128, "dtype": "float32", "head_dim": 16}  # fmt: skip
# head_dim of the layers with a window, and the pipeline depth: with half the bytes a token, a layer has twice the tokens in a block
CASES = pytest.mark.parametrize(
    ("weights", "depth"), [(16, 2), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((32, 1), (32, 2), (16, 1)))],
    indirect=["weights"],
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(ModelConfig):
    head_dims: tuple[int, int]

    def spec(self, layer: int) -> AttentionSpec:
        (heads, kv_heads, window), head_dim = HEADS[layer % 2], self.head_dims[layer % 2]
        return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, window, RopeConfig())


def read(reader: ConfigReader, architecture: str) -> ParallelConfig:
    dims = reader.integer("head_dim"), reader.integer("window_head_dim")
    return ParallelConfig(**reader.common(architecture), head_dims=dims)


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
def weights(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Tensor]]:
    """Of a model in the folder of the test, its family registered. The parameter: the head_dim of layers with a window."""
    register(PARALLEL)
    raw = RAW | {"window_head_dim": getattr(request, "param", 32)}
    config, generator = read_config(raw, "a test"), torch.Generator().manual_seed(3)
    with torch.device("meta"):
        empty = build_model(config, torch.float32, load_backend("cpu"), NullComm(), max_len=1)
    shapes = {name: target.values.shape for name, target in weight_targets(empty).items()}
    made = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    yield made
    del FAMILIES["ParallelForTest"]


def reference_logits(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Of the whole sequence at once, in plain torch: no cache, no module of the engine but the rotation."""
    x = weights["wte.weight"][ids]
    count = len(ids)
    for layer in range(RAW["num_hidden_layers"]):  # type: ignore[call-overload]
        of = {name.removeprefix(f"h.{layer}."): value for name, value in weights.items() if name.startswith(f"h.{layer}.")}
        heads, kv_heads, window = HEADS[layer % 2]
        dim = len(of["attn.k.weight"]) // kv_heads
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
    assert "Native kernels are off for this model, torch computes: it has a matrix fc" in caplog.text
    for prompt, answer in zip(prompts, answers):
        logprobs = reference_logits(weights, [*prompt, *answer.token_ids]).log_softmax(-1)[len(prompt) - 1 : -1]
        assert list(answer.token_ids) == logprobs.argmax(-1).tolist()
        assert answer.cumulative_logprob == pytest.approx(float(logprobs.max(-1).values.sum()), abs=1e-3)


@CASES
def test_windows_that_give_back_change_no_token(
    weights: dict[str, Tensor], tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small pool, prompts that share prefixes and are computed in chunks, samples that fork, and preemptions all the time."""
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1,preempt.every=7")
    shared = [(7 * i + i * i // 3) % 97 for i in range(31)]
    prompts = [shared[: 6 + 5 * number] + [number] for number in range(6)] * 2
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False, n=2)
    settings = {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 4, "num_gpu_blocks_override": 30, "pipeline_depth": depth}
    with LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, **settings) as llm:  # type: ignore[arg-type]
        scheduler = llm._core.scheduler  # type: ignore[attr-defined]
        given_back = count_given_back(scheduler.kv)
        answers = [output.outputs for output in llm.generate(prompts, greedy, use_tqdm=False)]
    assert scheduler.stats.preemptions and scheduler.stats.prefix_hits and given_back[0] > 50
    for prompt, samples in zip(prompts, answers):
        for sample in samples:
            best = reference_logits(weights, [*prompt, *sample.token_ids]).argmax(-1)[len(prompt) - 1 : -1]
            assert list(sample.token_ids) == best.tolist()


def count_given_back(kv: Any) -> list[int]:
    """Returns a list with a number, which counts the blocks that windows give back from now on."""
    count, give_back = [0], kv._free_unread

    def counted(seq: Any, behind: Any, plan: Any) -> None:
        count[0] += len(behind)
        give_back(seq, behind, plan)

    kv._free_unread = counted
    return count


@CASES
def test_it_is_verified_bit_for_bit(weights: dict[str, Tensor], tmp_path: Path, depth: int) -> None:
    verified = verify_it(tmp_path, depth)
    assert verified.kernels == "torch" and verified.compared.cache_values and verified.compared.output_values


def test_it_is_verified_with_the_twins_of_a_gpus_kernels(
    weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the null block behind a window, which padding leaves as it is: zero."""
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    assert verify_it(tmp_path, depth=2, kv_cache_layout="hnd").compared.cache_values


def verify_it(folder: Path, depth: int = 1, **settings: Any) -> Verified:
    source = resolve_model(str(folder))
    config = EngineConfig(model=str(folder), device="cpu", block_size=4, **settings)
    return verify(config, source, load_model_config(source), depth, 16)


def test_the_proof_sees_a_slip_in_the_table_of_a_window(
    weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = RequestTable.apply

    def forgetful(table: RequestTable, plan: StepPlan) -> None:
        apply(table, replace(plan, new_blocks=[entry for entry in plan.new_blocks if entry[3] != NULL_BLOCK]))

    def confused(table: RequestTable, plan: StepPlan) -> None:
        apply(table, replace(plan, new_blocks=[(row, group, index, block + group) for row, group, index, block in plan.new_blocks]))

    for slip, message in ((forgetful, "names a block that was given back: step .*, layer 1"), (confused, "the caches differ")):
        monkeypatch.setattr(RequestTable, "apply", slip)
        with pytest.raises(VerifyError, match=message):
            verify_it(tmp_path)


def test_its_memory_is_planned_from_the_description(weights: dict[str, Tensor], tmp_path: Path) -> None:
    shape = model_shape(str(tmp_path))
    needs = shape.needs("float32")
    assert needs.weights == 4 * sum(weight.numel() for weight in weights.values())
    assert [spec.window for spec in needs.specs] == [None, 5] * 2 and needs.bytes_per_token == 4 * 2 * 4 * 32
    codes = model_shape(str(tmp_path)).needs("float32", kv_cache_dtype="int8").specs
    assert [spec.buffers["k"].shape for spec in codes] == [(2, 16), (1, 32)] * 2 and codes[1].buffers["v_scale"].shape == (1,)
    config = resolved(EngineConfig(max_num_batched_tokens=8, max_num_seqs=8, block_size=4, num_gpu_blocks_override=21), "cpu")
    plan = plan_memory(needs, config, Memory(8 * GIB))
    assert plan.refusal is None and plan.geometry.groups == (CacheGroup((0, 2)), WindowGroup((1, 3), window=5))
    held = (2 * 8 + 5 - 2) // 4 + 2  # blocks of a window, at most
    assert plan.geometry.max_model_len == (20 - held) * 4 + 1, "the rest of the pool is for the full group"
    assert plan.concurrency == 20 / (-(-plan.geometry.max_model_len // 4) + held)
    assert plan.geometry.bytes_per_token == needs.bytes_per_token // 2 and plan.use.kv_cache == 21 * 4 * plan.geometry.bytes_per_token
    with pytest.raises(ConfigError, match="has room for 2 blocks of 4 tokens at 512 bytes per token, and needs at least 3"):
        plan_memory(needs, replace(config, num_gpu_blocks_override=2), Memory(8 * GIB))


def test_programs_that_cannot_run_a_model_are_turned_off_by_what_it_is_made_of(weights: dict[str, Tensor], tmp_path: Path) -> None:
    model, dense = model_shape(str(tmp_path)).model, describe(dense_config())
    for device, setting, off in (("cpu", "native", False), ("cuda", "enforce_eager", True)):
        config = resolved(EngineConfig(), device)  # type: ignore[arg-type]
        assert getattr(suited(config, model), setting) is off and suited(config, dense) == config
    layer = dense.layers[0]
    mixer: Any = layer.mixer
    experts = Experts(count=4, chosen=2)
    for other in (
        replace(layer, mixer=replace(mixer, context_ranks=2)), replace(layer, mlp=MLPShape(8, "gelu", experts)),
        replace(layer, mlp=MLPShape(8, experts=experts), parallel=True),
    ):  # fmt: skip
        assert not suited(resolved(EngineConfig(), "cpu"), replace(dense, layers=(other, other))).native
    windowed = replace(layer, mixer=replace(mixer, window=4))
    for other in (
        windowed, replace(layer, mixer=replace(mixer, soft_cap=30.0)), replace(layer, mixer=replace(mixer, rope=None, sinks=True)),
        replace(layer, mlp=MLPShape(8, "geglu")), replace(layer, norms="both", residual_scale=0.5), replace(layer, mlp=MLPShape(8, "gelu")),
        replace(layer, mixer=replace(mixer, alibi=True)), replace(layer, norm=NormShape(1e-3, "layer", bias=True), parallel=True),
    ):  # fmt: skip
        assert suited(resolved(EngineConfig(), "cpu"), replace(dense, layers=(layer, other))).native
    assert graph_refusal(replace(dense, layers=(layer, windowed))) is None
    assert graph_refusal(replace(dense, captured=False)) is not None


SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}  # fmt: skip


def dense_config(**fields: object) -> ModelConfig:
    return read_config({"architectures": ["Qwen3ForCausalLM"], **SHAPE, "mlp_bias": False, **fields}, "test")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if family.model == LLAMA.model and family.deal is None])
def test_the_description_names_every_parameter_of_the_module(architecture: str, tied: bool) -> None:
    config = dense_config(architectures=[architecture], tie_word_embeddings=tied, mlp_bias=True, text_config=SHAPE)
    with torch.device("meta"):
        model = build_model(config, torch.bfloat16, load_backend("cpu"), NullComm(), max_len=1)
    described = describe(config)
    matrices = [*described.matrices, *([described.lookup] if described.lookup else [])]
    shapes: dict[str, tuple[int, ...]] = {f"{one.module}.weight": (one.rows, one.columns) for one in matrices}
    shapes |= {f"{one.module}.bias": (one.rows,) for one in matrices if one.bias}
    shapes |= {f"{one.module}.weight": (one.size,) for one in described.vectors}
    shapes |= {f"{one.module}.bias": (one.size,) for one in described.vectors if one.bias}
    assert {one.module for one in described.vectors if one.wide} == {name for name, norm in model.named_modules() if is_wide(norm)}
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == shapes
    norms = {f"{family_of(config).rules.checkpoint_module(one.module)}.weight" for one in described.vectors}
    assert norms | {part for one in matrices for part in one.parts} == {name for name in weight_targets(model) if name.endswith(".weight")}
    summed = {name for name, module in model.named_modules() if isinstance(module, RowParallelLinear)}
    assert {one.module for one in matrices if one.split == "columns"} == summed


def is_wide(module: nn.Module) -> bool:
    return isinstance(module, RMSNorm) and module.weight.dtype == torch.float32


def test_rules_may_have_several_numbers_and_know_gguf_names() -> None:
    rules = Rules([Rule("model.layers.*.mlp.experts.*.up", "layers.*.experts.*.gate_up", "up", gguf="blk.*.ffn_up.*")])
    assert rules.checkpoint_module("layers.3.experts.14.gate_up", "up") == "model.layers.3.mlp.experts.14.up"
    assert rules.of_gguf("blk.3.ffn_up.14.weight") == "model.layers.3.mlp.experts.14.up.weight"
    assert rules.find("layers.3.experts.14.gate_up", "gate") is None
    assert LLAMA.rules.of_gguf("blk.12.attn_k.bias") == "model.layers.12.self_attn.k_proj.bias"
    assert [LLAMA.rules.of_gguf(name) for name in ("blk.1.ffn_gate_inp.weight", "rope_freqs.weight", "blk.1.attn_k.scale")] == [None] * 3
