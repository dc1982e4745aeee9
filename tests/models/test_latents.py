"""Families with latent attention: what they read from a config, describe and refuse, and how weights of every kind of file arrive."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.attention.spec import Latent
from octavo.config import EngineConfig
from octavo.errors import ConfigError, LoadError
from octavo.kernels.reference.latent import absorb, expand
from octavo.kernels.reference.layer import choose_in_groups, rms_norm, rotate
from octavo.loading.gguf import GGUFTensor, config_dict
from octavo.loading.shape import ModelShape
from octavo.models.registry import cache_specs, describe, family_of, rank_config, rank_parts, read_config
from octavo.models.split import Part
from octavo.sizing.auto import resolved
from octavo.sizing.native_size import native_refusal
from octavo.worker.backends import Run, choose_backends
from tests.equivalence.test_hybrids import GREEDY, open_llm, prompts_of
from tests.support.families import family_model
from tests.support.greedy import same_greedy_text
from tests.support.hybrids import load, opened
from tests.support.latents import ALIGNED, LATENTS
from tests.support.latents_gguf import latent_gguf
from tests.support.packers import published
from tests.support.quantized_models import Kind, in_fp8

V2, V3, GLM = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
COMMON: dict[str, Any] = {
    "attention_bias": False, "hidden_act": "silu", "kv_lora_rank": 512, "moe_layer_freq": 1, "qk_rope_head_dim": 64,
    "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = COMMON | {  # as published, in part, as the other two
    "architectures": [V3], "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "rms_norm_eps": 1e-06, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
V2_LITE: dict[str, Any] = COMMON | {
    "architectures": [V2], "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "rms_norm_eps": 1e-06, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
    "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
GLM_FLASH: dict[str, Any] = COMMON | {
    "architectures": [GLM], "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10240, "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.8, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
SMALL = {"num_hidden_layers": 2, "first_k_dense_replace": 1}


def read(raw: dict[str, Any], **changes: Any) -> Any:
    return read_config(raw | changes, "m/config.json")


@pytest.mark.parametrize(
    ("raw", "billions", "active", "latent", "groups"),
    [
        (DEEPSEEK_V3, 671, 37.5, Latent(1536, 128, 128), ("sigmoid", 8, 4, 2.5)),
        (V2_LITE, 15.7, 2.7, Latent(None, 128, 128), ("all", 1, 1, 1.0)),
        (GLM_FLASH, 29.9, 3.9, Latent(768, 192, 256), ("sigmoid", 1, 1, 1.8)),
    ],
    ids=["v3", "v2 lite", "glm"],
)
def test_published_configs_are_read(raw: dict[str, Any], billions: float, active: float, latent: Latent, groups: tuple[Any, ...]) -> None:
    config = read(raw)
    model, spec, experts = describe(config), config.attention(), config.layers[-1].mlp.experts
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.06)
    assert (spec.latent, spec.head_dim, spec.value_dim, spec.rotated, spec.num_kv_heads) == (latent, 576, 512, 64, 1)
    assert (experts.scores, experts.groups, experts.chosen_groups, experts.scale) == groups and not experts.shared_gated
    assert sum(layer.mlp.experts is None for layer in config.layers) == raw["first_k_dense_replace"]
    assert native_refusal(model) is None and model.captured
    specs = cache_specs(config, "bfloat16")
    assert {spec.bytes_per_token for spec in specs} == {576 * 2}, "not the keys and values of all heads"
    assert ModelShape("m", config).needs("bfloat16").bytes_per_token == len(specs) * 576 * 2


def test_scores_and_tables_are_scaled_for_a_longer_context() -> None:
    """By the root of what the published code multiplies scores by: once for q and once for k."""
    scaled = (0.1 * torch.log(torch.tensor(40.0)).item() + 1) ** 2
    assert read(DEEPSEEK_V3).attention().scale == pytest.approx(192**-0.5 * scaled)
    assert read(GLM_FLASH).attention().scale == pytest.approx(256**-0.5)
    assert read(DEEPSEEK_V3, rope_scaling=None).attention().scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(
    ("raw", "changes", "said"),
    [
        (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even, got 63"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank must be an integer from 1"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads must be num_attention_heads 128"),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias must be false, got True"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave must be true, got False"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        (DEEPSEEK_V3, {"n_group": 7}, "n_group must be a divisor of n_routed_experts 256, got 7"),
        (DEEPSEEK_V3, {"n_group": 256, "topk_group": 8}, "n_group must be at most 128: the score of a group is the sum of"),
        (DEEPSEEK_V3, {"topk_group": 9}, "topk_group must be at most n_group 8"),
        (DEEPSEEK_V3, {"n_group": 64, "topk_group": 1}, "topk_group must be at most n_group 64, with num_experts_per_tok 8 experts"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 61}, "first_k_dense_replace must be below num_hidden_layers 61"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy, got 'noaux_tc'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob must be false, got True"),
        (V2_LITE, {"n_routed_experts": None}, "n_routed_experts must be an integer from 1"),
        (GLM_FLASH, {"mlp_layer_types": ["dense"] * 47}, "mlp_layer_types must be 47 of dense or sparse"),
        (GLM_FLASH, {"hidden_act": "gelu"}, "hidden_act must be silu"),
    ],
)  # fmt: skip
def test_what_such_a_model_cannot_compute_is_refused_by_its_key(raw: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError) as error:
        read(raw, **changes)
    assert str(error.value).startswith(f"m/config.json: {said}"), error.value


def test_some_backends_sizes_and_caches_of_integers_are_refused_by_name() -> None:
    model = describe(read(V2_LITE))
    (choice,) = choose_backends(Run(resolved(EngineConfig(), "cpu"), "float32", "cpu"), model)
    assert choice.backend.name == "cpu" and len(choice.layers) == 27
    (choice,) = choose_backends(on_gpu(), model)
    assert choice.backend.name == "triton" and choice.backend.graphs == "every"
    (choice,) = choose_backends(on_gpu(deterministic=True), model)
    assert choice.backend.name == "triton" and choice.backend.deterministic
    refused = {
        r"^layer 0 needs latent, which attention backend flashinfer does not support: ": on_gpu(attention_backend="flashinfer"),
        r"kv_cache_dtype is int8, dtype is bfloat16, and attention backend triton keeps .*: leave": on_gpu(kv_cache_dtype="int8"),
        r"kv_cache_dtype is int8, and layer 0 caches a latent .*: leave kv_cache_dtype at auto$": Run(
            resolved(EngineConfig(kv_cache_dtype="int8"), "cpu"), "float32", "cpu"
        ),
    }
    for said, run in refused.items():
        with pytest.raises(ConfigError, match=said):
            choose_backends(run, model)
    for sizes in ({"kv_lora_rank": 520}, {"qk_rope_head_dim": 80}):
        with pytest.raises(
            ConfigError, match=r"layer 0 has latents of \d+ and rotary keys of \d+ numbers, .* up to 512 and 64: set device"
        ):
            choose_backends(on_gpu(), describe(read(V2_LITE, **sizes)))


def on_gpu(**settings: Any) -> Run:
    return Run(resolved(EngineConfig(**settings), "cuda"), "bfloat16", "cuda")


def test_ranks_have_some_heads_and_all_latents() -> None:
    raw = DEEPSEEK_V3 | SMALL
    whole, own, parts, base = read(raw), rank_config(read(raw), 4), rank_parts(read(raw), 4, 1), "model.layers.0.self_attn"
    assert cache_specs(own, "float32") == cache_specs(whole, "float32"), "every rank stores all latents"
    assert parts[f"{base}.q_b_proj.weight"] == Part(rows=range(32 * 192, 64 * 192), whole=128 * 192)
    assert parts[f"{base}.kv_b_proj.k.weight"] == Part(rows=range(32 * 128, 64 * 128), whole=128 * 128)
    assert parts[f"{base}.o_proj.weight"] == Part(columns=range(32 * 128, 64 * 128), whole=128 * 128)
    assert parts[f"{base}.kv_a_proj_with_mqa.weight"] == Part(rows=range(576), whole=576)
    assert parts[f"{base}.q_a_proj.weight"] == Part(rows=range(1536), whole=1536)
    with pytest.raises(ConfigError, match="num_attention_heads 128 cannot be split over tensor_parallel_size 3: sizes that can: 1, 2, 4"):
        rank_config(read(raw), 3)


# -- the reference kernels, by the formulas


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_scores_with_latents_are_those_with_keys_of_every_head() -> None:
    heads, plain, rotary, rank, values, tokens = 3, 5, 4, 7, 6, 9
    q, kv, weight = drawn(tokens, heads * (plain + rotary)), drawn(tokens, rank + rotary, seed=1), drawn(rank, seed=2)
    k_up, v_up, angle = drawn(heads * plain, rank, seed=3), drawn(heads * values, rank, seed=4), drawn(tokens, rotary // 2, seed=5)
    cos, sin = angle.cos(), angle.sin()
    latents, turned = rms_norm(kv[:, :rank], weight, 1e-6), rotate(kv[:, None, rank:], cos, sin)
    by_head = q.view(tokens, heads, -1)
    keys = torch.cat([(latents @ k_up.T).view(tokens, heads, plain), turned.expand(-1, heads, -1)], dim=2)
    queries = torch.cat([by_head[..., :plain], rotate(by_head[..., plain:], cos, sin)], dim=2)
    wanted = torch.einsum("qhd,khd->hqk", queries, keys)
    made = absorb(q, kv, k_up, (weight, 1e-6), cos, sin).view(tokens, heads + 1, rank + rotary)
    found = torch.einsum("qhd,kd->hqk", made[:, :heads], made[:, heads])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    weights = wanted.softmax(-1)
    of_values = torch.einsum("hqk,khv->qhv", weights, (latents @ v_up.T).view(tokens, heads, values))
    of_latents = expand(torch.einsum("hqk,kl->qhl", weights, latents), v_up)
    torch.testing.assert_close(of_latents, of_values.flatten(1), rtol=1e-4, atol=1e-4)


def test_the_score_of_a_group_is_its_best_expert_or_its_best_two() -> None:
    logits = torch.tensor([[3.0, -9, 2.5, 2.4, -1, -1]])  # groups of two: the first has the best expert, the second the best two
    assert choose_in_groups(logits, 1, "all", False, 3, 1, None, 1.0)[0].tolist() == [[0]]
    assert choose_in_groups(logits, 1, "sigmoid", False, 3, 1, None, 1.0)[0].tolist() == [[2]]


def test_a_bias_decides_who_is_chosen_and_not_the_weights() -> None:
    logits, bias = torch.tensor([[1.0, 0.5, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 9.0])
    ids, weights = choose_in_groups(logits, 2, "sigmoid", True, 1, 1, bias, 2.5)
    assert ids.tolist() == [[3, 0]]
    of_both = torch.tensor([-1.0, 1.0]).sigmoid()
    torch.testing.assert_close(weights[0], 2.5 * of_both / of_both.sum())


# -- files


@pytest.mark.parametrize(("name", "layer"), [("deepseek v3", 61), ("glm 4.7 flash", 47)])
def test_the_layer_that_predicts_a_further_token_is_left_out(name: str, layer: int, tmp_path: Path) -> None:
    folder = family_model(tmp_path / "model", LATENTS[name], seed=51)
    file = folder / "model.safetensors"
    weights = load_file(file)
    parts = ("eh_proj.weight", "self_attn.kv_b_proj.weight", "embed_tokens.weight")
    extra = {f"model.layers.{layer}.{part}": torch.zeros(3, 3) for part in parts}
    save_file(weights | extra, file)
    load(folder)
    save_file(weights | {f"model.layers.{layer - 1}.eh_proj.weight": torch.zeros(3, 3)}, file)
    with pytest.raises(LoadError, match=f"1 unknown to this model: model.layers.{layer - 1}.eh_proj.weight"):
        load(folder)


def quantised(folder: Path, method: str) -> tuple[Path, Path]:
    """Returns the folder with all matrices of layers quantised, as they are published, and one with the floats that they stand for."""
    weights, plain, codes = load_file(folder / "model.safetensors"), {}, {}
    for number, (name, weight) in enumerate(weights.items()):
        plain[name] = codes[name] = weight
        if weight.dim() < 2 or ".layers." not in name or name.endswith("mlp.gate.weight"):
            continue
        module = name.removesuffix(".weight")
        del codes[name]
        if method == "fp8":
            stored, plain[name] = in_fp8(module, weight, Kind("fp8"))
        else:
            one = published(*weight.shape, 32, 4, number)
            stored, plain[name] = one.awq(module), one.weight()
        codes |= stored
    config = json.loads((folder / "config.json").read_text())
    methods = {
        "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    }
    for path, tensors, extra in ((folder / "plain", plain, {}), (folder / method, codes, {"quantization_config": methods[method]})):
        path.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | extra))
    return folder / method, folder / "plain"


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_quantised_folders_give_the_text_of_the_floats_they_stand_for(method: str, tmp_path: Path) -> None:
    """kv_b_proj is dequantised, head by head. Blocks of 128 rows are not those of heads."""
    codes, plain = quantised(family_model(tmp_path / "model", ALIGNED, seed=52), method)
    answers = []
    for path, native in ((codes, False), (plain, False), (codes, True)):
        with open_llm(path, native) as llm:
            answers.append(llm.generate(prompts_of((1, 40)), GREEDY, use_tqdm=False))
    assert all(map(same_greedy_text, *answers[:2]))
    for of_codes, of_floats in zip(answers[2], answers[0], strict=True):  # the native kernels round activations to 8 bits
        ours, theirs = of_codes.outputs[0].logprobs[0], of_floats.outputs[0].logprobs[0]
        assert all(abs(ours[token].logprob - theirs[token].logprob) < 0.2 for token in ours.keys() & theirs.keys())


@pytest.mark.parametrize("old", [False, True])
def test_codes_of_a_gguf_file_arrive_in_the_order_of_the_model(old: bool, tmp_path: Path) -> None:
    folder = family_model(tmp_path / "model", ALIGNED, seed=53)
    _, file = opened(latent_gguf(folder, tmp_path / "model.gguf", kind="Q8_0", old=old))
    _, plain = opened(folder)
    assert sorted(file.names()) == sorted(plain.names())
    for name in file.names():
        values, wanted = file.read(name), plain.read(name)
        assert values.shape == wanted.shape == file.shape(name), name
        assert (values - wanted).abs().max() < 0.02 * wanted.abs().max(), name


# -- GGUF metadata


def gguf_config(tensors: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": 3, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
        "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 576,
        "attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.kv_lora_rank": 512,
        "rope.dimension_count": 64, "rope.freq_base": 1e4, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
        "expert_shared_count": 1, "leading_dense_block_count": 1,
    }  # fmt: skip
    metadata = {"general.architecture": "deepseek2"} | {f"deepseek2.{key}": value for key, value in (keys | changes).items()}
    names = ("token_embd.weight", *tensors)
    return config_dict(metadata, {name: GGUFTensor(name, (320, 64), "F32", 0, 0) for name in names}, "m.gguf")


def test_metadata_of_a_gguf_file_tell_the_family_by_how_experts_are_scored() -> None:
    plain: Any = read_config(gguf_config(), "m.gguf")
    assert (plain.architecture, family_of(plain).name, plain.attention().latent) == (V2, "deepseek_v2", Latent(None, 128, 128))
    assert plain.layers[1].mlp.experts.plain and not plain.layers[1].mlp.experts.normed
    changes = {
        "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 4, "expert_group_used_count": 2,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.yarn_log_multiplier": 0.1, "attention.q_lora_rank": 24,
    }  # fmt: skip
    biased: Any = read_config(gguf_config(("blk.1.exp_probs_b.bias",), **changes), "m.gguf")
    experts = biased.layers[1].mlp.experts
    assert (biased.architecture, experts.scores, experts.normed, experts.scale) == (V3, "sigmoid", True, 2.5)
    assert (experts.groups, experts.chosen_groups, biased.attention().latent.q_rank) == (4, 2, 24)
    assert biased.attention().rope.mscale_all_dim == pytest.approx(1.0)
    older: Any = read_config(gguf_config(**{"attention.key_length_mla": 192, "expert_gating_func": 1}), "m.gguf")
    assert older.attention().latent == plain.attention().latent


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expert_gating_func": 4}, r"deepseek2.expert_gating_func must be 1 \(softmax\) or 2 \(sigmoid\), got 4"),
        ({"rope.dimension_count": 192}, "deepseek2.attention.key_length_mla must be above deepseek2.rope.dimension_count 192"),
        ({"expert_weights_norm": 1}, "deepseek2.expert_weights_norm must be true or false, got 1"),
    ],
)
def test_metadata_that_do_not_describe_such_a_model_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError, match=said):
        gguf_config(**changes)
