"""Random mixtures of experts of odd shapes, saved as `transformers` saves them, and as files on the hub and GGUF files have them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, HIDDEN, HEADS, KV_HEADS, LAYERS = 320, 72, 6, 3, 3
COUNT, CHOSEN, INNER, SHARED, PLAIN = 5, 3, 21, 37, 50  # experts, of which a token takes some; sizes that no tile divides
MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}


def options_of(architecture: str, inner: int, count: int, chosen: int) -> dict[str, Any]:
    if architecture == "MixtralForCausalLM":
        return {"num_local_experts": count, "num_experts_per_tok": chosen, "intermediate_size": inner}
    if architecture == "GptOssForCausalLM":
        named = {"num_local_experts": count, "num_experts_per_tok": chosen, "intermediate_size": inner}
        return {**named, "head_dim": 16, "sliding_window": 11, "rope_parameters": YARN}
    named = {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner, "intermediate_size": PLAIN}
    if architecture == "Qwen2MoeForCausalLM":
        return {**named, "shared_expert_intermediate_size": SHARED, "norm_topk_prob": False}
    return {**named, "norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 16}


def tiny_mixture(
    folder: Path, architecture: str, seed: int, inner: int = INNER, count: int = COUNT, chosen: int = CHOSEN, **shape: Any
) -> Path:
    """A random mixture whose tokens choose all experts about equally often. `shape`: other fields of its config"""
    import transformers

    family = architecture.removesuffix("ForCausalLM")
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**(fields | options_of(architecture, inner, count, chosen) | shape))
    model = getattr(transformers, architecture)(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = _scaled(name, noise, columns=1 if family == "GptOss" and noise.dim() == 3 else -1)
    model.save_pretrained(folder)
    return folder


def _scaled(name: str, noise: Tensor, columns: int) -> Tensor:
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if noise.dim() == 1 or name.endswith("_bias"):
        return 0.5 * noise
    wide = 2.0 if "embed_tokens" in name or "lm_head" in name else 1.5  # wide enough for a clamped gate to clamp some
    return wide * noise / noise.shape[columns] ** 0.5


def to_mxfp4(folder: Path, target: Path) -> Path:
    """gpt-oss as on the hub: experts in blocks and scales. The folder's own floats become those that the codes stand for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights, floats = load_file(folder / "model.safetensors"), {}
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = floats[name] = weight
            continue
        rows = weight.transpose(1, 2)  # [experts, rows, columns]
        seed = torch.Generator().manual_seed(len(stored))
        blocks = torch.randint(256, (*rows.shape[:2], rows.shape[2] // 32, 16), dtype=torch.uint8, generator=seed)
        scales = torch.randint(122, 125, blocks.shape[:3], dtype=torch.uint8, generator=seed)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
    target.mkdir()
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (target / "config.json").write_text(json.dumps(config))
    return target
