"""Tiny models of the dense families as GGUF files: names, keys and folded norms as llama.cpp's converter writes them."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.families import FULL, SLIDING, Tiny
from tests.support.models import interleaved, write_keys, write_tensor

INTERLEAVED = ("llama", "granite", "smollm3")  # by the converter: folders are not


def family_gguf(folder: Path, path: Path, tiny: Tiny, kind: str = "F32") -> Path:
    import gguf

    assert tiny.gguf is not None
    config = json.loads((folder / "config.json").read_text())
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == tiny.gguf)
    names = gguf.get_tensor_name_map(architecture, config.get("num_hidden_layers") or config["n_layer"])
    writer = gguf.GGUFWriter(path, tiny.gguf)
    WRITERS[tiny.gguf](writer, config)
    for name, weight in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        target = names.get_name(name.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
        write_tensor(writer, target, _stored(name, weight, tiny, config), kind)
    for target, values in _factors(config).items():
        write_tensor(writer, target, torch.tensor(values), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(name: str, weight: Tensor, tiny: Tiny, config: dict[str, Any]) -> Tensor:
    if name.endswith("norm.weight"):
        return weight + tiny.less
    if "query_key_value" in name:  # from [heads][q k v][head_dim] to [q k v][heads][head_dim]
        return weight.unflatten(0, (config["n_head"], 3, -1)).transpose(0, 1).flatten(0, 2)
    if tiny.gguf in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        return interleaved(weight, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    return weight


def _factors(config: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the tensors that are part of the rotation."""
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        return {"rope_factors_long.weight": rope["long_factor"], "rope_factors_short.weight": rope["short_factor"]}
    return {"rope_freqs.weight": _llama3_factors(rope, config["head_dim"])} if rope.get("rope_type") == "llama3" else {}


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """Returns what each frequency is divided by: 1 for short waves, `factor` for long ones, and something between for those between."""
    low, high, original, factor = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "factor")
    )
    found = []
    for pair in range(head_dim // 2):
        turns = original / (2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _plain(writer: Any, config: dict[str, Any]) -> None:
    write_keys(writer, config)


def _phi3(writer: Any, config: dict[str, Any]) -> None:
    rope, heads = config["rope_parameters"], config["num_attention_heads"]
    original = rope.get("original_max_position_embeddings", config["original_max_position_embeddings"])
    write_keys(writer, config | {"rope_parameters": {"rope_theta": rope["rope_theta"]}}, widths=False)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * config["hidden_size"]) // heads)
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _gemma2(writer: Any, config: dict[str, Any]) -> None:
    write_keys(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _gemma3(writer: Any, config: dict[str, Any]) -> None:
    ropes = config["rope_parameters"]
    write_keys(writer, config | {"rope_parameters": ropes[FULL]})
    writer.add_rope_freq_base_swa(ropes[SLIDING]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _granite(writer: Any, config: dict[str, Any]) -> None:
    write_keys(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _cohere(writer: Any, config: dict[str, Any]) -> None:
    write_keys(writer, config)
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] == "cohere2":
        writer.add_sliding_window(config["sliding_window"])


def _glm4(writer: Any, config: dict[str, Any]) -> None:
    write_keys(writer, config, widths=False)
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]))


def _bloom(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["seq_length"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(4 * config["hidden_size"])
    writer.add_head_count(config["n_head"])
    writer.add_head_count_kv(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_eos_token_id(config["eos_token_id"])


WRITERS = {
    "command-r": _cohere, "cohere2": _cohere, "glm4": _glm4, "bloom": _bloom,
    "llama": _plain, "smollm3": _plain, "olmo2": _plain, "granite": _granite, "phi3": _phi3, "gemma2": _gemma2, "gemma3": _gemma3,
}  # fmt: skip
