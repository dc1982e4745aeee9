"""Configs of the dense families: what published models say is read as it is meant, and what cannot be computed is refused by its key."""

from typing import Any

import pytest

from octavo.errors import ConfigError, LoadError
from octavo.loading.gguf import GGUFTensor, config_dict, gguf_form
from octavo.loading.shape import ModelShape
from octavo.models.registry import describe, family_of, rank_config, rank_parts, read_config
from octavo.models.split import Part
from octavo.policy.cache_group import CacheGroup
from octavo.policy.cache_spec import blocks_for, one_group, token_bytes
from tests.support.layer_fields import of_layers

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
GEMMA3_4B = {  # google/gemma-3-4b-it, config.json: its text part leaves most to its defaults
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip


def read(architecture: str, **changes: Any) -> Any:
    return read_config({"architectures": [architecture], **SIZES, **changes}, "m/config.json")


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
SEVEN = [1.0] * 7


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be an integer from 1"),
        ("MistralForCausalLM", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("MinistralForCausalLM", {"layer_types": ["full_attention"]}, "layer_types must be 4 of full_attention or sliding_attention"),
        ("Phi3ForCausalLM", {"rope_scaling": LONGROPE | {"short_factor": SEVEN}}, "rope: short_factor must be 8 numbers from 1e-06"),
        ("Phi3ForCausalLM", {"rope_scaling": LONGROPE | {"long_factor": [*SEVEN, 0]}}, "rope: long_factor must be 8 numbers"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "rope: short_factor must be 8 numbers"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.01}, "partial_rotary_factor must be a part of head_dim 16 that is an even number"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.6}, "partial_rotary_factor must be a part of head_dim 16"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 2}, "partial_rotary_factor must be a number from 0 to 1"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic'; supported: default, linear, llama3, yarn, lon"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation must be gelu_pytorch_tanh, got 'gelu'"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a number from 0.001"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": 3}}, "rope_parameters must be objects"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern must be an integer"),
        ("Gemma3ForConditionalGeneration", {"text_config": [1]}, "text_config must be an object"),
        ("Gemma3ForConditionalGeneration", {"text_config": {}}, "text_config: hidden_size must be an integer"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling must be a number"),
        ("GraniteForCausalLM", {"residual_multiplier": "0.22"}, "residual_multiplier must be a number"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers must be at least 4 of 0 or 1"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, True]}, "no_rope_layers must be at least 4 of 0 or 1"),
        ("Olmo2ForCausalLM", {"hidden_act": "relu"}, "hidden_act must be silu"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_compute_is_refused_by_its_key(architecture: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError, match=f"^m/config.json: .*{said}"):
        read(architecture, **changes)


def test_what_published_files_leave_out_has_its_familys_meaning() -> None:
    gemma: Any = read_config(GEMMA3_4B, "m/config.json")
    spec, ropes = gemma.attention(), of_layers(gemma, "rope")
    assert (gemma.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, gemma.max_position) == (262208, 8, 4, 256, 131072)
    assert gemma.tie_embeddings and gemma.eos_token_ids == (1, 106) and gemma.dtype == "bfloat16"
    assert of_layers(gemma, "window") == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    assert {(rope.kind, rope.theta, rope.factor) for rope in ropes} == {("linear", 1e6, 8.0), ("default", 1e4, 1.0)}
    assert ropes[5].kind == "linear" and ropes[4].theta == 1e4
    assert (spec.scale, gemma.embedding_scale, spec.soft_cap, gemma.logit_cap) == (256**-0.5, 2560**0.5, None, None)
    gemma2 = read("Gemma2ForCausalLM")
    assert (gemma2.attention().soft_cap, gemma2.logit_cap, gemma2.attention().head_dim, gemma2.tie_embeddings) == (50.0, 30.0, 256, True)
    assert of_layers(read("Gemma2ForCausalLM", sliding_window=64), "window") == (64, None, 64, None)
    assert [rope and rope.theta for rope in of_layers(read("SmolLM3ForCausalLM"), "rope")] == [2e6, 2e6, 2e6, None]
    for fields, window in (
        ({"max_position_embeddings": 32768}, 4096), ({"max_position_embeddings": 32768, "sliding_window": None}, None),
        ({"sliding_window": 512}, None),  # no sequence leaves it
    ):  # fmt: skip
        assert of_layers(read("MistralForCausalLM", **fields), "window") == (window,) * 4
    six = {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6}
    phi = read("Phi3ForCausalLM", partial_rotary_factor=0.75, rope_scaling=LONGROPE | six).attention()
    assert (phi.rotary_dim, phi.rope.factor, phi.rope.original_max_position) == (12, 8.0, 64)
    assert read("Phi3ForCausalLM", rope_scaling={**LONGROPE, "rope_type": "su"}).attention().rope.kind == "longrope"  # in the first files
    assert read("Phi3ForCausalLM", rope_scaling=LONGROPE).attention().rotary_dim is None


BLOOM_560M = {
    "architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": False, "bos_token_id": 1, "eos_token_id": 2,
    "layer_norm_epsilon": 1e-05, "n_embed": 1024, "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100,
    "seq_length": 2048, "vocab_size": 250880,
}  # fmt: skip
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"], "bos_token_id": 5, "eos_token_id": 255001, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 14336, "layer_norm_eps": 1e-05, "logit_scale": 0.25, "max_position_embeddings": 8192, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4,
    "use_embedding_sharing": True, "vocab_size": 256000,
}  # fmt: skip


def test_so_has_what_those_of_cohere_and_bloom_leave_out() -> None:
    bloom: Any = read_config(BLOOM_560M, "m/config.json")
    assert (bloom.num_layers, bloom.hidden_size, bloom.layers[0].mlp.inner, bloom.attention().head_dim) == (24, 1024, 4096, 64)
    assert bloom.attention().alibi and bloom.tie_embeddings and bloom.max_position == 2048
    names = ("word_embeddings.weight", "h.3.self_attention.query_key_value.bias", "ln_f.bias", "transformer.h.3.mlp.dense_4h_to_h.weight")
    rules = family_of(bloom).rules
    assert [rules.of_checkpoint(name) for name in names] == [f"transformer.{name.removeprefix('transformer.')}" for name in names]
    command: Any = read_config(COMMAND_R7B, "m/config.json")
    windows, ropes = of_layers(command, "window"), of_layers(command, "rope")
    assert windows == tuple(4096 if (layer + 1) % 4 else None for layer in range(32)) and command.tie_embeddings
    assert [rope is None for rope in ropes] == [window is None for window in windows] and ropes[0].theta == 50000
    with pytest.raises(LoadError, match=r"^m/config.json: use_qk_norm must be false: layer norms on the heads of q and k"):
        read_config(COMMAND_R7B | {"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "m/config.json")


def test_merged_weights_are_split_in_runs_of_rows_and_a_norm_over_all_heads_is_not_split() -> None:
    parts = rank_parts(read("Phi3ForCausalLM"), 2, 1)
    # q: 4 heads of 16 rows; k and v: 2 heads each; of each the second half
    assert parts["model.layers.3.self_attn.qkv_proj.weight"] == Part(runs=(range(32, 64), range(80, 96), range(112, 128)), whole=128)
    assert parts["model.layers.0.mlp.gate_up_proj.weight"] == Part(runs=(range(48, 96), range(144, 192)), whole=192)
    with pytest.raises(ConfigError, match=r"family olmo cannot be split .its norms of q and k are over the heads of all ranks.: set"):
        rank_config(read("Olmo2ForCausalLM"), 2)


def test_what_is_unlike_the_plain_layer_is_named() -> None:
    named = {
        "MistralForCausalLM": None,
        "Phi3ForCausalLM": None,
        "Gemma2ForCausalLM": "layer 0 has an MLP of kind geglu",
        "Olmo2ForCausalLM": "layer 0 has norms after its sub-layers",
        "GraniteForCausalLM": None,
    }
    assert {name: describe(read(name)).unlike_the_plain_layer() for name in named} == named
    scaled = {"residual_multiplier": "layer 0 scales what it adds by 2", "embedding_multiplier": "its embedding is scaled by 2",
              "logits_scaling": "its logits are scaled by 0.5"}  # fmt: skip
    for key, said in scaled.items():
        assert describe(read("GraniteForCausalLM", **{key: 2.0})).unlike_the_plain_layer() == said
    asked = {
        read("Gemma2ForCausalLM").attention(1): ("soft_cap",),
        read("Phi3ForCausalLM", partial_rotary_factor=0.5).attention(0): ("partial_rotation",),
        read("SmolLM3ForCausalLM").attention(3): ("no_rotation",),
        read("SmolLM3ForCausalLM").attention(2): (),
        read("Olmo2ForCausalLM").attention(0): ("whole_norm",),
    }
    assert {spec: spec.features for spec in asked} == asked


@pytest.mark.parametrize(("layers", "window"), [(26, 512), (34, 1024), (48, 1024)])  # of Gemma 3 1B, 4B and 12B
def test_windows_leave_a_fifth_of_the_cache(layers: int, window: int) -> None:
    """What a sequence of 32k tokens holds while it decodes, against what it would hold if every layer kept all tokens."""
    config = read("Gemma3ForCausalLM", num_hidden_layers=layers, sliding_window=window, max_position_embeddings=32768)
    needs = ModelShape("gemma", config).needs("bfloat16")

    def held(groups: tuple[CacheGroup, ...]) -> int:
        return blocks_for(groups, 16, 32768, step_tokens=1) * 16 * token_bytes(needs.specs, groups)

    assert held(one_group(needs.specs)) == 32768 * layers * 2 * 2 * 256 * 2  # k and v of two heads
    assert 0.15 < held(needs.groups) / held(one_group(needs.specs)) < 0.21


# -- GGUF metadata


def keys_of(architecture: str, **changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "logit_scale": 2.0,
    }  # fmt: skip
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in (plain | changes).items()}


def tensors_of(*names: str) -> dict[str, GGUFTensor]:
    shapes = {"token_embd.weight": (320, 64), **dict.fromkeys(names, (8,))}
    return {name: GGUFTensor(name, shape, "F32", 0, 0) for name, shape in shapes.items()}


LONG, SHORT, SINGLE = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"


@pytest.mark.parametrize(
    ("architecture", "changes", "factors", "said"),
    [
        ("granite", {"rope.scaling.finetuned": False}, {}, "granite.rope.scaling.finetuned must be absent or true, got False"),
        ("olmo2", {"attention.sliding_window": 32}, {}, "olmo2.attention.sliding_window must be absent or at least the context length 512"),
        ("llama", {"attention.sliding_window": 32}, {}, "llama.attention.sliding_window must be absent"),
        ("llama", {"rope.scaling.type": "dynamic"}, {}, "rope.scaling.type must be one of none, linear, yarn, longrope, got 'dynamic'"),
        ("llama", {"rope.scaling.type": "longrope"}, {}, "is longrope, and there are no tensors rope_factors_long.weight and"),
        ("llama", {"rope.scaling.attn_factor": 1.2}, {}, "rope.scaling.attn_factor must be 1, or the file must have rope_factors_long"),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {SINGLE: [8.0] * 8},
         "llama.rope.scaling.type must be none or longrope, because the file has a factor for each frequency, got 'linear'"),
        ("phi3", {}, {LONG: [1.0] * 8}, "has one of rope_factors_long.weight and rope_factors_short.weight"),
        ("phi3", {}, {LONG: [2.0] * 8, SHORT: [1.0] * 8, SINGLE: [8.0] * 8}, "or rope_freqs.weight in addition"),
        ("gemma3", {"attention.sliding_window": 0}, {}, "gemma3.attention.sliding_window must be an integer from 1"),
        ("gemma2", {"expert_count": 4}, {}, "gemma2.expert_count must be 0"),
    ],
)  # fmt: skip
def test_what_a_gguf_file_asks_for_in_vain_is_refused_by_its_key(
    architecture: str, changes: dict[str, Any], factors: dict[str, list[float]], said: str
) -> None:
    with pytest.raises(LoadError, match=said):
        config_dict(keys_of(architecture, **changes), tensors_of(*factors), "m.gguf", factors)


def test_factors_of_a_gguf_file_become_a_rotation() -> None:
    def rope(architecture: str, factors: dict[str, list[float]], **changes: Any) -> Any:
        keys = keys_of(architecture, **changes)
        return read_config(config_dict(keys, tensors_of(*factors), "m.gguf", factors), "m.gguf").attention().rope  # type: ignore[attr-defined]

    single = rope("llama", {SINGLE: [1.0] * 4 + [8.0] * 4})
    assert (single.kind, single.factors, single.long_factors, single.attention_factor) == ("longrope", *[(1.0,) * 4 + (8.0,) * 4] * 2, 1.0)
    assert rope("llama", {SINGLE: [1.0] * 8}).kind == "default", "factors of 1 change nothing"
    scaling = {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 128}
    both = rope("phi3", {LONG: [2.0] * 8, SHORT: [1.5] * 8}, **scaling)
    assert (both.factors, both.long_factors, both.attention_factor, both.original_max_position) == ((1.5,) * 8, (2.0,) * 8, 1.25, 128)
    with pytest.raises(LoadError, match="short_factor must be 8 numbers"):
        rope("llama", {SINGLE: [8.0] * 7})


def test_the_largest_gemma_of_a_file_scales_its_scores_by_what_the_file_does_not_say() -> None:
    def scale(architecture: str, layers: int) -> float:
        keys = keys_of(architecture, **{"block_count": layers, "attention.key_length": 32, "attention.value_length": 32})
        return read_config(config_dict(keys, tensors_of(), "m.gguf"), "m.gguf").attention().scale  # type: ignore[attr-defined, no-any-return]

    assert scale("gemma2", 42) == 32**-0.5 and scale("gemma2", 46) == 16**-0.5 and scale("gemma3", 62) == 16**-0.5


def test_every_architecture_of_gguf_files_is_known_by_one_family() -> None:
    known = {"llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmo2", "granite", "smollm3"}
    assert {gguf_form({"general.architecture": name}, "m.gguf")[2] for name in known} == known
