"""Tiny models with latent attention as GGUF files: names, keys and orders as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.support.hybrids_gguf import with_stacks
from tests.support.models import write_tensor

KV_B = "kv_b_proj.weight"


def latent_gguf(folder: Path, path: Path, kind: str = "F32", old: bool = False) -> Path:
    """`old`: k and v in one tensor, and keys of attention over keys and values of heads"""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "deepseek2")
    _write_keys(writer, config, old)
    for name, weight in with_stacks(load_file(folder / "model.safetensors")).items():
        for converted, values in _converted(name, weight, config, old).items():
            target = names.get_name(converted, try_suffixes=(".weight", ".bias"))
            assert target is not None, converted
            write_tensor(writer, target, values, "F32" if values.dim() == 1 or name.endswith("mlp.gate.weight") else kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return path


def _converted(name: str, weight: Tensor, config: dict[str, Any], old: bool) -> dict[str, Tensor]:
    if name.endswith("e_score_correction_bias"):
        return {f"{name.removesuffix('_bias')}.bias": weight}
    if not name.endswith(KV_B) or old:
        return {name: weight}
    by_head = weight.unflatten(0, (config["num_attention_heads"], -1))
    k, v = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    base = name.removesuffix(KV_B)
    return {f"{base}k_b_proj.weight": k.transpose(1, 2).contiguous(), f"{base}v_b_proj.weight": v.contiguous()}


def _write_keys(writer: Any, config: dict[str, Any], old: bool) -> None:
    import gguf

    heads, rotated, rank = config["num_attention_heads"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    widths = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads if old else 1)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(widths[0] if old else rank + rotated)
    writer.add_value_length(widths[1] if old else rank)
    if not old:
        writer.add_key_length_mla(widths[0])
        writer.add_value_length_mla(widths[1])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotated)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    _write_experts(writer, config)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])


def _write_experts(writer: Any, config: dict[str, Any]) -> None:
    import gguf

    softmax = config["model_type"] == "deepseek_v2"
    dense = config.get("mlp_layer_types", []).count("dense") or config["first_k_dense_replace"]
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID)
    if config.get("n_group") is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
