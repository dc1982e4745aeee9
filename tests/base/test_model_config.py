"""`ModelConfig`: every value out of a file is checked, and what is wrong is told by file and key."""

import math
from typing import Any

import pytest

from octavo.errors import LoadError
from octavo.model_config import RopeConfig
from octavo.models.registry import FAMILIES, read_config
from tests.support.layer_fields import of_layers

RAW: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
WINDOWED = {"sliding_window": 16, "use_sliding_window": True}


def read(**changes: Any) -> Any:
    return read_config({key: value for key, value in (RAW | changes).items() if value != "absent"}, "m/config.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *[({key: bad}, f"{key} must be an integer from 1 to") for key in
          ("num_attention_heads", "num_key_value_heads", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "head_dim",
           "max_position_embeddings") for bad in (0, -1, 1.5, "4", True, 10**12)],
        *[({key: "absent"}, f"{key} must be an integer from 1 to .*, got '.missing.'") for key in
          ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")],
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 1024, got 1000000000"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None},
         "hidden_size 64 is not a multiple of num_attention_heads 3"),
        ({"head_dim": 33}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        *[({"rms_norm_eps": bad}, "rms_norm_eps must be a number from") for bad in (0, -1, math.nan, math.inf, "1e-5", True)],
        *[({"rope_theta": bad}, "rope_theta must be a number from") for bad in (0, math.nan, "1", 10**400)],
        ({"rope_scaling": {"rope_type": "linear", "factor": math.nan}}, "rope: factor must be a number from 1e-06 to .*, got nan"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope: factor must be a number from"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": math.inf}}, "rope: beta_fast"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic'; supported: default, linear, llama3, yarn, longrope"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        *[({"architectures": bad}, f"architectures is .*; supported: {', '.join(FAMILIES)}")
          for bad in (["GPT2LMHeadModel"], None, [], ["LlamaForCausalLM", "x"], "LlamaForCausalLM", [["LlamaForCausalLM"]], 5)],
        *[(WINDOWED | {"layer_types": bad}, "layer_types must be 4 of full_attention or sliding_attention")
          for bad in (["full_attention"] * 3, ["full_attention"] * 3 + ["linear"], "full_attention", [None] * 4, [["x"]] * 4, 4)],
        (WINDOWED | {"sliding_window": 0}, "sliding_window must be an integer"),
        (WINDOWED | {"max_window_layers": -1}, "max_window_layers must be an integer"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id or a list"),
        ({"eos_token_id": [2, -1]}, "eos_token_id must be a token id or a list"),
        ({"bos_token_id": 1.0}, "bos_token_id must be a token id or a list"),
        *[({key: "yes"}, f"{key} must be true or false") for key in
          ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")],
        ({"dtype": 5}, "dtype must be"),
    ],
)  # fmt: skip
def test_a_value_no_model_can_have_is_refused_by_file_and_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadError, match=f"^m/config.json: .*{said}") as refusal:
        read(**changes)
    assert len(str(refusal.value)) < 300 + len(", ".join(FAMILIES)), "a huge value is not repeated"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 16}, (None,) * 4),
        ({"sliding_window": 16, "use_sliding_window": False}, (None,) * 4),
        (WINDOWED | {"sliding_window": None}, (None,) * 4),
        (WINDOWED | {"max_window_layers": 1}, (None, 16, 16, 16)),
        (WINDOWED | {"max_window_layers": 0}, (16, 16, 16, 16)),
        (WINDOWED, (None,) * 4),
        (WINDOWED | {"layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 16, None, 16)),
    ],
)
def test_windows_are_told_layer_by_layer(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert of_layers(read(**changes), "window") == windows


def test_families_differ_in_biases_and_norms() -> None:
    seen = {
        name: (config.qkv_bias, config.output_bias, config.attention().qk_norm)
        for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
        for config in [read(architectures=[name], attention_bias=True)]
    }
    assert seen == {
        "LlamaForCausalLM": (True, True, None),
        "Qwen2ForCausalLM": (True, False, None),
        "Qwen3ForCausalLM": (True, True, "heads"),
    }
    assert not read(architectures=["LlamaForCausalLM"]).qkv_bias and read(architectures=["Qwen2ForCausalLM"]).qkv_bias


def test_rope_is_read_in_its_old_and_its_new_words() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0, "original_max_position_embeddings": 128}
    wanted = RopeConfig(
        kind="llama3", theta=5e5, factor=8.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_position=128
    )  # fmt: skip
    assert read(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}).attention().rope == wanted
    assert read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}).attention().rope == wanted
    assert read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}).attention().rope == wanted
    assert read(rope_scaling=None).attention().rope == RopeConfig(original_max_position=512)


def test_what_may_be_absent_has_a_meaning() -> None:
    config = read(num_key_value_heads="absent", head_dim="absent", max_position_embeddings="absent", rms_norm_eps="absent")
    assert (config.attention().num_kv_heads, config.attention().head_dim, config.max_position, config.norm.eps) == (4, 16, 2048, 1e-6)
    assert (config.eos_token_ids, config.bos_token_id, config.dtype, config.tie_embeddings) == ((), None, None, False)
    full = read(eos_token_id=[2, 3], bos_token_id=1, torch_dtype="bfloat16", tie_word_embeddings=True)
    assert (full.eos_token_ids, full.bos_token_id, full.dtype, full.tie_embeddings) == ((2, 3), 1, "bfloat16", True)
    assert read(eos_token_id=2).eos_token_ids == (2,)
