"""Tiny models with recurrent layers as GGUF files: names, keys, orders and folded values as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.families import Tiny
from tests.support.models import write_keys, write_tensor

DELTA = ".linear_attn."


def hybrid_gguf(folder: Path, path: Path, tiny: Tiny, kind: str = "F32", old: bool = False, further: int = 0, trunk: bool = True) -> Path:
    """`old`: the first files of Qwen3-Next, whose projections are as in the folder; `further`: layers that predict further tokens;
    `trunk`: all other layers, too
    """
    import gguf

    assert tiny.gguf is not None
    config = json.loads((folder / "config.json").read_text())
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == tiny.gguf)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, tiny.gguf)
    _write_keys(writer, config, further)
    weights = with_stacks(load_file(folder / "model.safetensors"))
    for name, weight in weights.items():
        if not trunk and ".layers." in name:
            continue
        for converted, values in _converted(name.replace("language_model.", ""), weight, config, old).items():
            target = names.get_name(converted, try_suffixes=(".weight", ".bias"))
            assert target is not None, converted
            plain = values.dim() == 1 or "conv1d" in name or name.endswith("mlp.gate.weight")
            write_tensor(writer, target, values, "F32" if plain else kind)
    for layer in range(config["num_hidden_layers"], config["num_hidden_layers"] + further):
        _write_further(writer, layer, weights, config, names)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return path


def _write_further(writer: Any, layer: int, weights: dict[str, Tensor], config: dict[str, Any], names: Any) -> None:
    """A layer with attention, whatever its number, and what joins the hidden state and the embedding of a token."""
    hidden = config["hidden_size"]
    last = f".{config['num_hidden_layers'] - 1}."
    for name, weight in weights.items():
        if last in name:
            stem, _, rest = names.get_name(name.replace("language_model.", ""), try_suffixes=(".weight", ".bias")).partition(last)
            write_tensor(writer, f"{stem}.{layer}.{rest}", torch.randn(weight.shape), "BF16")  # which no test mistakes for others
    write_tensor(writer, f"blk.{layer}.nextn.eh_proj.weight", torch.randn(hidden, 2 * hidden), "BF16")
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        write_tensor(writer, f"blk.{layer}.nextn.{norm}.weight", torch.randn(hidden), "F32")


def with_stacks(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of all experts of a layer in one tensor."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        before, _, after = name.partition(".experts.")
        if not after:
            found[name] = weight
        elif after.startswith("0."):
            part = after.removeprefix("0.")
            experts = range(sum(other.startswith(f"{before}.experts.") and other.endswith(part) for other in weights))
            found[f"{before}.experts.{part}"] = torch.stack([weights[f"{before}.experts.{expert}.{part}"] for expert in experts])
    return found


def _converted(name: str, weight: Tensor, config: dict[str, Any], old: bool) -> dict[str, Tensor]:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        weight = weight + 1
    if name.endswith("shared_expert_gate.weight"):
        weight = weight.squeeze(0)
    if DELTA not in name:
        return {name: weight}
    base, _, leaf = name.partition(DELTA)
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim, times = config["linear_key_head_dim"], config["linear_value_head_dim"], v_heads // k_heads
    if leaf == "in_proj_qkvz.weight" and not old:
        q, k, v, z = weight.view(k_heads, -1, weight.shape[1]).split([k_dim, k_dim, times * v_dim, times * v_dim], dim=1)
        qkv = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        return {f"{base}{DELTA}in_proj_qkv.weight": qkv, f"{base}{DELTA}in_proj_z.weight": z.flatten(0, 1)}
    if leaf == "conv1d.weight":
        weight = weight.squeeze(1)
    if leaf == "A_log":
        weight = -weight.exp()
    if "num_experts" not in config or config["model_type"] != "qwen3_next":  # Qwen3.5: the first v heads of all k heads come first
        if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
            weight = torch.cat([weight[: 2 * k_heads * k_dim], _tiled(weight[2 * k_heads * k_dim :], k_heads, times)])
        elif leaf == "out_proj.weight":
            weight = _tiled(weight.T, k_heads, times).T.contiguous()
        elif leaf != "norm.weight":
            weight = _tiled(weight, k_heads, times)
    return {f"{base}{DELTA}{'dt_proj.bias' if leaf == 'dt_bias' else leaf}": weight}


def _tiled(rows: Tensor, k_heads: int, times: int) -> Tensor:
    heads = rows.view(k_heads, times, -1, *rows.shape[1:])
    return torch.stack([heads[:, time] for time in range(times)]).reshape(rows.shape)


def _write_keys(writer: Any, config: dict[str, Any], further: int) -> None:
    blocks = config["num_hidden_layers"] + further
    write_keys(writer, config | {"intermediate_size": config.get("intermediate_size", 1), "num_hidden_layers": blocks})
    if further:
        writer.add_nextn_predict_layers(further)
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
