"""Models and forms that there are and that are not supported: each is refused by its whole name, beside the names that are supported."""

import re
from typing import Any

import pytest

from octavo.errors import LoadError
from octavo.loading.gguf import GGUFTensor, config_dict
from octavo.models.registry import FAMILIES, read_config

WORDS = "llama, qwen2, qwen3, phi3, gemma2, gemma3, olmo2, granite, smollm3, qwen2moe, qwen3moe, gpt-oss"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 2,
    "num_attention_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
}  # fmt: skip
KEYS: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 256, "llama.embedding_length": 64,
    "llama.feed_forward_length": 64, "llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
TENSORS = {"token_embd.weight": GGUFTensor("token_embd.weight", (300, 64), "F32", 0, 300 * 64 * 4)}


def refused(said: str) -> Any:
    return pytest.raises(LoadError, match=re.escape(said))


@pytest.mark.parametrize(
    "name",
    ["Llama4ForConditionalGeneration", "DeepseekV32ForCausalLM", "Gemma3nForConditionalGeneration", "MambaForCausalLM", "FalconForCausalLM",
     "Qwen2_5_VLForConditionalGeneration"],
)  # fmt: skip
def test_a_folder_of_another_architecture(name: str) -> None:
    with refused(f"m/config.json: architectures is ['{name}']; supported: {', '.join(FAMILIES)}"):
        read_config(CONFIG | {"architectures": [name]}, "m/config.json")


@pytest.mark.parametrize("word", ["llama4", "glm-dsa", "gemma3n", "mamba", "falcon", "qwen2vl", "clip"])
def test_a_gguf_file_of_another_architecture(word: str) -> None:
    with refused(f"m.gguf: general.architecture is '{word}'; supported: {WORDS}"):
        config_dict(KEYS | {"general.architecture": word}, TENSORS, "m.gguf")


@pytest.mark.parametrize("kind", ["dynamic", "mrope", "proportional"])
def test_a_rotation_of_another_kind(kind: str) -> None:
    with refused(f"m/config.json: rope_type is '{kind}'; supported: default, linear, llama3, yarn, longrope"):
        read_config(CONFIG | {"rope_scaling": {"rope_type": kind, "factor": 2.0, "mrope_section": [2, 2, 2]}}, "m/config.json")
    with refused(f"m.gguf: llama.rope.scaling.type must be one of none, linear, yarn, longrope, got '{kind}'"):
        config_dict(KEYS | {"llama.rope.scaling.type": kind}, TENSORS, "m.gguf")


def test_windows_of_olmo_3_which_come_under_the_word_of_olmo_2() -> None:
    keys = {key.replace("llama", "olmo2"): value for key, value in KEYS.items()} | {"general.architecture": "olmo2"}
    config_dict(keys, TENSORS, "m.gguf")
    with refused("m.gguf: olmo2.attention.sliding_window must be absent or at least the context length 256, got 64"):
        config_dict(keys | {"olmo2.attention.sliding_window": 64}, TENSORS, "m.gguf")


def test_a_part_of_a_split_file() -> None:
    with refused("m.gguf: is one of 3 parts of a split file; join them with llama-gguf-split --merge"):
        config_dict(KEYS | {"split.count": 3, "split.no": 0}, TENSORS, "m.gguf")
