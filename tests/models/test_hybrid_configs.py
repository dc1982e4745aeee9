"""What families with recurrent layers read from a config, what they describe, and what they refuse."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.attention.capabilities import INVARIANT, TRITON
from octavo.attention.delta_net import DeltaNetSpec
from octavo.config import EngineConfig
from octavo.errors import ConfigError, LoadError
from octavo.loading.gguf import GGUFTensor, config_dict
from octavo.loading.shape import ModelShape, stored_weights
from octavo.models.registry import cache_specs, describe, family_of, rank_config, rank_parts, read_config, stage_config
from octavo.models.split import Part
from octavo.policy.cache_group import CacheGroup
from octavo.policy.cache_spec import split_layers, token_bytes
from octavo.quant.quant_config import QuantConfig, read_quant_config
from octavo.sizing.auto import resolved
from octavo.sizing.model_size import requantised
from octavo.worker.backends import Run, choose_backends

PLAIN, NEXT, IMAGES = "Qwen3_5ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForConditionalGeneration"
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}  # fmt: skip
QWEN35_35B: dict[str, Any] = {  # as published, in part
    "architectures": [IMAGES], "model_type": "qwen3_5_moe", "image_token_id": 248056, "tie_word_embeddings": False,
    "text_config": {
        "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_size": 2048, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
    "vision_config": {"depth": 27},
}  # fmt: skip


def read(architecture: str = PLAIN, **changes: Any) -> Any:
    return read_config({"architectures": [architecture], **SIZES, **changes}, "m/config.json")


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        (PLAIN, {"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 2"),
        (PLAIN, {"linear_num_key_heads": 0}, "linear_num_key_heads must be an integer from 1"),
        (PLAIN, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer from 2 to 64, got 1"),
        (PLAIN, {"linear_value_head_dim": 4096}, "linear_value_head_dim must be an integer from 1 to 1024"),
        (PLAIN, {"layer_types": ["linear_attention"] * 7}, "layer_types must be 8 of full_attention or linear_attention"),
        (PLAIN, {"layer_types": ["sliding_attention"] * 8}, "layer_types must be 8 of full_attention or linear_attention"),
        (PLAIN, {"layer_types": ["linear_attention"] * 8}, "none of the 8 layers is of type full_attention"),
        (PLAIN, {"full_attention_interval": 9}, "none of the 8 layers is of type full_attention"),
        (PLAIN, {"full_attention_interval": 0}, "full_attention_interval must be an integer from 1"),
        (PLAIN, {"partial_rotary_factor": 0.3, "head_dim": 10}, "partial_rotary_factor must be a part of head_dim 10"),
        (PLAIN, {"hidden_act": "gelu"}, "hidden_act must be silu"),
        (NEXT, {"num_experts": 0}, "num_experts must be an integer from 1"),
        (NEXT, {"decoder_sparse_step": 99}, "leave no layer with experts"),
        (IMAGES, {"text_config": 3}, "text_config must be an object"),
        (IMAGES, {"text_config": {}}, "text_config: num_attention_heads must be an integer"),
    ],
)  # fmt: skip
def test_what_a_hybrid_cannot_compute_is_refused_by_its_key(architecture: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError, match=f"^m/config.json: .*{said}"):
        read(architecture, **changes)


def test_a_published_config_of_text_and_images_is_read() -> None:
    config: Any = read_config(QWEN35_35B, "m/config.json")
    assert (config.num_layers, config.max_position, config.eos_token_ids, config.dtype) == (40, 262144, (248044,), "bfloat16")
    kinds = [layer.mixer.kind for layer in config.layers]
    assert kinds == (["delta_net"] * 3 + ["attention"]) * 10
    assert config.layers[0].mixer == DeltaNetSpec(16, 32, 128, 128, 4, 1e-6)
    spec, mlp = config.attention(3), config.layers[0].mlp
    assert (spec.rotary_dim, spec.rope.kind, spec.rope.theta, spec.qk_norm, spec.scale) == (64, "default", 1e7, "heads", 1 / 16)
    assert spec.features == ("partial_rotation", "output_gate") and spec.projections["gate"] == spec.q_size == 4096
    assert (mlp.inner, mlp.experts.count, mlp.experts.chosen, mlp.experts.normed, mlp.experts.shared_inner) == (512, 256, 8, True, 512)
    rules = family_of(config).rules
    names = ("model.language_model.layers.1.linear_attn.A_log", "model.visual.blocks.0.norm1.bias", "mtp.fc.weight", "model.mtp.fc.weight")
    assert [rules.of_checkpoint(name) for name in names] == ["model.layers.1.linear_attn.A_log", None, None, None]
    assert describe(config).num_parameters == pytest.approx(35e9, rel=0.02)


def test_matrices_and_vectors_of_a_recurrent_layer() -> None:
    model = describe(read())
    channels = 2 * 2 * 8 + 6 * 16
    found = {one.name: (one.module, one.rows, one.columns) for one in model.matrices if one.layer == 0}
    assert found["delta_in"] == ("layers.0.delta_net.in_proj", channels + 96, 64)
    assert found["delta_gates"] == ("layers.0.delta_net.gates", 12, 64) and found["output"] == ("layers.0.delta_net.output", 64, 96)
    vectors = {one.name: (one.module, one.size, one.wide) for one in model.vectors if one.layer == 0}
    assert vectors["delta_conv"] == ("layers.0.delta_net.conv", channels * 4, False)
    assert vectors["delta_decay"] == ("layers.0.delta_net.decay", 6, True) and vectors["delta_norm"][1] == 16
    assert {"delta_dt_bias", "attention_norm", "mlp_norm"} < set(vectors) and "q_norm" not in vectors
    attention = next(one for one in model.matrices if one.name == "qkv")
    assert (attention.layer, list(attention.parts.values())) == (3, [64, 32, 32, 64])
    gates = next(one for one in model.matrices if one.name == "delta_gates")
    assert requantised(gates, "int8", "cpu") is None, "they stay floats"
    assert model.captured


def test_recurrent_layers_belong_to_no_cache_group_and_have_a_state() -> None:
    specs = cache_specs(read(), "bfloat16")
    assert [bool(spec.buffers) for spec in specs] == [False, False, False, True] * 2
    assert [bool(spec.state) for spec in specs] == [True, True, True, False] * 2
    assert split_layers(specs) == (CacheGroup((3, 7)),)
    assert token_bytes(specs, split_layers(specs)) == 2 * 2 * 2 * 16 * 2  # layers, k and v, heads, numbers, bytes
    assert specs[0].state_bytes == (3 * 128 + 6 * 8 * 16) * 4
    needs = ModelShape("m", read()).needs("float32")
    assert needs.groups == (CacheGroup((3, 7)),) and sum(spec.state_bytes for spec in needs.specs) == 6 * specs[0].state_bytes


def test_a_rank_has_whole_heads_and_a_part_of_each_section_of_a_merged_weight() -> None:
    """2 k heads of 8 and 6 v heads of 16: q, k and v have 16, 16 and 96 rows, one after the other, and so has the convolution."""
    parts, base = rank_parts(read(), 2, 1), "model.layers.0.linear_attn"
    second = Part(runs=(range(8, 16), range(24, 32), range(80, 128)), whole=128)
    assert parts[f"{base}.in_proj_qkv.weight"] == parts[f"{base}.conv1d.weight"] == second
    assert parts[f"{base}.in_proj_z.weight"] == Part(rows=range(48, 96), whole=96)
    assert parts[f"{base}.out_proj.weight"] == Part(columns=range(48, 96), whole=96)
    for name in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        assert parts[f"{base}.{name}"] == Part(rows=range(3, 6), whole=6)
    assert f"{base}.norm.weight" not in parts
    attention = "model.layers.3.self_attn"
    assert parts[f"{attention}.q_proj.q.weight"] == parts[f"{attention}.q_proj.gate.weight"] == Part(rows=range(32, 64), whole=64)
    one = Part(runs=(range(8), range(8, 16), range(64, 112)), whole=112)  # both ranks have the only k head
    assert rank_parts(read(linear_num_key_heads=1), 2, 1)[f"{base}.in_proj_qkv.weight"] == one


def test_the_states_of_ranks_and_stages_are_those_of_the_whole_model() -> None:
    config = read()
    whole, own = (cache_specs(one, "float32")[0] for one in (config, rank_config(config, 2)))
    assert 2 * own.state_bytes == whole.state_bytes and own.state["recurrent"].shape == (3, 8, 16)
    stages = [cache_specs(stage_config(config, layers), "float32") for layers in (range(3), range(3, 8))]
    assert [spec.state_bytes for specs in stages for spec in specs] == [spec.state_bytes for spec in cache_specs(config, "float32")]


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({}, (3,), "num_attention_heads 4 cannot be split over tensor_parallel_size 3: sizes that can: 1, 2"),
        ({"num_key_value_heads": 4}, (4,), "linear_num_value_heads 6 cannot be split over tensor_parallel_size 4: sizes that can: 1, 2"),
        ({"linear_num_key_heads": 3, "num_attention_heads": 8}, (2,),
         "linear_num_key_heads 3 cannot be split over tensor_parallel_size 2: sizes that can: 1"),
        ({}, (2, 2), "decode_context_parallel_size is 2, and the model has recurrent layers, whose states cannot be split by tokens: "
         "set it to 1"),
        ({}, (2, 1, 2), "enable_expert_parallel is set, and this model has no experts: leave it out"),
    ],
)  # fmt: skip
def test_ranks_that_a_hybrid_cannot_have_are_refused_by_name(changes: dict[str, Any], ranks: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        rank_config(read(**changes), *ranks)
    assert str(error.value) == said


@pytest.mark.parametrize("deterministic", [False, True])
def test_both_kinds_of_layers_have_kernels_on_every_device(deterministic: bool) -> None:
    model = describe(read())
    on_cpu = choose_backends(Run(resolved(EngineConfig(), "cpu"), "float32", "cpu"), model)
    assert [(choice.backend.name, len(choice.layers)) for choice in on_cpu] == [("cpu", 6), ("cpu", 2)]
    config = resolved(EngineConfig(deterministic=deterministic), "cuda")
    on_gpu = choose_backends(Run(config, "bfloat16", "cuda"), model)
    backend = INVARIANT if deterministic else TRITON
    assert [(choice.backend, len(choice.layers)) for choice in on_gpu] == [(backend, 6), (backend, 2)]


def test_heads_that_gpu_kernels_lack_are_refused_by_name() -> None:
    on_gpu = Run(resolved(EngineConfig(), "cuda"), "bfloat16", "cuda")
    with pytest.raises(ConfigError, match="layer 0 has heads of 512, and attention backend triton has only multiples of 16 up to 256"):
        choose_backends(on_gpu, describe(read(linear_key_head_dim=512)))
    flashinfer = Run(resolved(EngineConfig(attention_backend="flashinfer"), "cuda"), "bfloat16", "cuda")
    with pytest.raises(ConfigError, match="layer 0 has a mixer of kind delta_net, which attention backend flashinfer does not compute"):
        choose_backends(flashinfer, describe(read()))


def test_quantised_weights_are_counted_by_the_modules_whose_rows_they_hold() -> None:
    quantization = read_quant_config(
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}}, "m"
    )
    assert isinstance(quantization, QuantConfig)
    base = "model.layers.0.linear_attn.in_proj_qkvz"
    tensors = {f"{base}.{part}": (kind, shape) for part, kind, shape in (("qweight", "I32", (8, 448)), ("scales", "F16", (2, 448)))}
    found = stored_weights(tensors, "m", quantization, family_of(read(NEXT, num_experts=4, num_experts_per_tok=2)).rules)
    assert [(one.name.rpartition("linear_attn.")[2], one.codes is not None) for one in found] == [
        ("in_proj_qkv.weight", True), ("in_proj_z.weight", True),
    ]  # fmt: skip


# -- GGUF metadata


def gguf_config(architecture: str = "qwen35", **changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": 8, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 32, "attention.value_length": 32,
        "rope.dimension_count": 8, "rope.freq_base": 1e7, "rope.dimension_sections": [2, 1, 1, 0], "ssm.conv_kernel": 4,
        "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 96, "full_attention_interval": 4,
    }  # fmt: skip
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in (keys | changes).items()}
    tensors = {"token_embd.weight": GGUFTensor("token_embd.weight", (320, 64), "F32", 0, 0)}
    return config_dict(metadata, tensors, "m.gguf")


@pytest.mark.parametrize("further", [{}, {"block_count": 11, "nextn_predict_layers": 3}], ids=["", "further tokens"])
def test_metadata_of_a_gguf_file_describe_the_same_layers(further: dict[str, Any]) -> None:
    config: Any = read_config(gguf_config(**further), "m.gguf")
    assert config.layers[0].mixer == DeltaNetSpec(2, 6, 8, 16, 4, 1e-6)
    assert [layer.mixer.kind for layer in config.layers] == (["delta_net"] * 3 + ["attention"]) * 2
    assert (config.attention(3).head_dim, config.attention(3).rotary_dim, config.attention(3).rope.theta) == (32, 8, 1e7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nextn_predict_layers": 8}, "qwen35.nextn_predict_layers must be less than qwen35.block_count 8, got 8"),
        ({"nextn_predict_layers": -1}, "qwen35.nextn_predict_layers must be an integer from 0 to 2147483647, got -1"),
        ({"nextn_predict_layers": 1.0}, "qwen35.nextn_predict_layers must be an integer from 0"),
        ({"ssm.inner_size": 97}, "qwen35.ssm.inner_size must be a multiple of qwen35.ssm.time_step_rank 6, got 97"),
        ({"ssm.conv_kernel": 0}, "qwen35.ssm.conv_kernel must be an integer from 1"),
    ],
)
def test_metadata_that_do_not_describe_such_layers_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError, match=said):
        gguf_config(**changes)

def test_states_lower_the_number_of_sequences_at_start_and_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [PLAIN], **SIZES, "max_position_embeddings": 512}))
    small: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 20, "native": False}
    with caplog.at_level(logging.INFO, "octavo"):
        with LLM(str(tmp_path), **small) as llm:
            rows = llm._core.scheduler.limits.max_num_seqs
        assert 4 < rows < 64 and f"max_num_seqs is {rows} instead of 256: a sequence has two states of" in caplog.text
        assert f"two for each of {rows} sequences and" in caplog.text
        with LLM(str(tmp_path), max_num_seqs=64, **small) as llm:
            assert llm._core.scheduler.limits.max_num_seqs == 64
