"""Random mixtures of experts of odd shapes, as `transformers` saves them, and as files on the hub and GGUF files have them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.attention.backend import load_backend
from octavo.comm.comm import NullComm
from octavo.loading.loader import weight_targets
from octavo.models.registry import build_model, read_config
from tests.support.models import interleaved, write_keys, write_tensor

VOCAB, HIDDEN, HEADS, KV_HEADS, LAYERS = 320, 72, 6, 3, 3
COUNT, CHOSEN, INNER, SHARED, PLAIN = 5, 3, 21, 38, 50  # experts, of which a token takes some; sizes that no tile divides
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


def plain_folder(folder: Path, architecture: str, seed: int = 5, **fields: Any) -> Path:
    """Another one, with a weight of each expert, whatever the family's files have, and without `transformers`."""
    raw = {
        "architectures": [architecture], "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "dtype": "float32", "bos_token_id": 1,
        "eos_token_id": 2, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip
    raw = raw | options_of(architecture, inner=32, count=4, chosen=2) | fields
    with torch.device("meta"):
        empty = build_model(read_config(raw, "test"), torch.float32, load_backend("cpu"), NullComm(), max_len=1)
    dice = torch.Generator().manual_seed(seed)
    weights = {}
    for name, target in weight_targets(empty).items():
        weights[name] = _scaled(name, torch.randn(target.values.shape, generator=dice), columns=-1).contiguous()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors")
    return folder


GGUF_WORDS = {
    "MixtralForCausalLM": "llama", "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3MoeForCausalLM": "qwen3moe", "GptOssForCausalLM": "gpt-oss",
}  # fmt: skip
GGUF_NAMES = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


def to_mixture_gguf(folder: Path, path: Path, kind: str) -> Path:
    """A plain folder as llama.cpp's converter would write it: the weights of all experts of a layer in one tensor."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    word = GGUF_WORDS[config["architectures"][0]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[word.replace("-", "_").upper()], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, word)
    write_keys(writer, config)
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if word == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        words = name.split(".")
        if "experts" in words:
            stacks.setdefault(f"blk.{words[2]}.ffn_{GGUF_NAMES[words[-2]]}_exps.{words[-1]}", {})[int(words[-3])] = weight
            continue
        if word == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = interleaved(weight, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        routes = "ffn_gate_inp" in target
        write_tensor(writer, f"{target}.weight" if "sinks" in target else target, weight.squeeze(0), "F32" if routes else kind)
    for target, experts in stacks.items():
        stack = torch.stack([experts[expert] for expert in range(len(experts))])
        write_tensor(writer, target, stack, "F32" if target.endswith("bias") else kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return path


def fused(folder: Path) -> Path:
    """A plain folder of gpt-oss with one tensor for all experts, whose rows take turns."""
    weights, rest = load_file(folder / "model.safetensors"), {}
    parts: dict[str, Tensor] = {}
    for name, weight in weights.items():
        (parts if ".experts." in name else rest)[name] = weight
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        for leaf, ending in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                torch.stack([parts[f"{at}.{expert}.{part}_proj.{leaf}"] for expert in range(4)]) for part in ("gate", "up", "down")
            )
            turns = torch.stack([gate, up], dim=2).flatten(1, 2)  # [experts, 2 * inner, hidden], or without the last
            rest[f"{at}.gate_up_proj{ending}"] = turns if ending else turns.transpose(1, 2).contiguous()
            rest[f"{at}.down_proj{ending}"] = down if ending else down.transpose(1, 2).contiguous()
    save_file(rest, folder / "model.safetensors")
    return folder


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
