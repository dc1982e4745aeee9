"""Small models in the layouts of AWQ, GPTQ, FP8 and compressed-tensors, and the same models in the floats that those stand for."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.packers import Published, published

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 320, 128, 256, 4, 2, 2
SHAPES = {
    "self_attn.q_proj": (128, HIDDEN), "self_attn.k_proj": (64, HIDDEN), "self_attn.v_proj": (64, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 128), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # act-order finds one order for them


@dataclass(frozen=True)
class Kind:
    """How a test's model is quantised."""

    method: str = "awq"
    bits: int = 4
    group_size: int = 32
    sym: bool = False
    act_order: bool = False
    own_orders: bool = False  # each projection has one of its own
    first_format: bool = True  # of GPTQ's two
    architecture: str = "LlamaForCausalLM"
    tie: bool = False
    scales: str = "blocks"  # of FP8: or "rows", or "tensor"
    compressed: bool = False  # FP8 under the names of compressed-tensors

    @property
    def config(self) -> dict[str, Any]:
        table: dict[str, Any] = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "fp8":
            return fp8_config(self)
        if self.method in ("words", "bytes"):
            return compressed_config(self)
        if self.method == "awq":
            return table | {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
        return table | {"sym": self.sym, "desc_act": self.act_order, "checkpoint_format": "gptq" if self.first_format else "gptq_v2"}


def write_both(folder: Path, kind: Kind) -> tuple[Path, Path]:
    """(the quantised folder, one with the floats it stands for)"""
    rest = _rest(kind)
    codes, floats = dict(rest), dict(rest)
    for name, source in _modules(kind).items():
        if kind.method == "fp8":
            stored, floats[f"{name}.weight"] = in_fp8(name, source.weight(), kind)
            codes |= stored
        else:
            codes |= _stored(source, name, kind)
            floats[f"{name}.weight"] = source.weight()
    config = {
        "architectures": [kind.architecture], "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": kind.tie, "dtype": "float32", "eos_token_id": 2,
    }  # fmt: skip
    quantized = write_model(folder / "quantized", config | {"quantization_config": kind.config}, codes)
    return quantized, write_model(folder / "floats", config, floats)


def quantise(source: Path, folder: Path, kind: Kind, chosen: str, table: dict[str, Any]) -> tuple[Path, Path]:
    """The same for a folder of floats: the modules whose names match `chosen` get random codes. `table`: added to `quantization_config`"""
    codes, floats = dict[str, Tensor](), dict[str, Tensor]()
    for number, (name, weight) in enumerate(load_file(source / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or not re.search(chosen, module):
            stored, floats[name] = {name: weight}, weight
        elif kind.method == "fp8":
            stored, floats[name] = in_fp8(module, weight, kind)
        else:
            n, k = weight.shape
            drawn = published(n, k, kind.group_size, kind.bits, number, symmetric=kind.sym, act_order=kind.act_order)
            drawn.scales = (drawn.scales * float(weight.std() / drawn.weight().std())).astype(drawn.scales.dtype)
            stored, floats[name] = _stored(drawn, module, kind), drawn.weight()
        codes |= stored
    config = json.loads((source / "config.json").read_text())
    quantized = write_model(folder / "quantized", config | {"quantization_config": kind.config | table}, codes)
    return quantized, write_model(folder / "floats", config, floats)


def _stored(source: Published, name: str, kind: Kind) -> dict[str, Tensor]:
    if kind.method == "awq":
        return source.awq(name)
    if kind.method == "gptq":
        return source.gptq(name, kind.first_format)
    return source.words(name, kind.sym) if kind.method == "words" else source.bytes(name, kind.sym)


def in_fp8(name: str, weight: Tensor, kind: Kind) -> tuple[dict[str, Tensor], Tensor]:
    """(floats of 8 bits with scales for blocks of 128 x 128, for rows or for the whole matrix; the floats that they stand for)"""
    height, wide = {"blocks": (128, 128), "rows": (1, weight.shape[1]), "tensor": tuple(weight.shape)}[kind.scales]
    scale = torch.stack([torch.stack([block.abs().amax() / 448 for block in rows.split(wide, 1)]) for rows in weight.split(height)])
    in_full = scale.repeat_interleave(height, 0).repeat_interleave(wide, 1)[: weight.shape[0], : weight.shape[1]]
    values, inverse = (weight / in_full).to(torch.float8_e4m3fn), kind.scales == "blocks" and not kind.compressed
    stored = scale.squeeze() if kind.scales == "tensor" else scale
    return {f"{name}.weight": values, f"{name}.weight_scale{'_inv' if inverse else ''}": stored}, values.float() * in_full


def fp8_config(kind: Kind) -> dict[str, Any]:
    if not kind.compressed:
        block = {"weight_block_size": [128, 128]} if kind.scales == "blocks" else {}
        return {"quant_method": "fp8", "activation_scheme": "dynamic", **block}
    strategy = {"blocks": "block", "rows": "channel", "tensor": "tensor"}[kind.scales]
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [128, 128] if strategy == "block" else None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}},
    }  # fmt: skip


def compressed_config(kind: Kind) -> dict[str, Any]:
    weights = {
        "num_bits": kind.bits, "type": "int", "symmetric": kind.sym, "strategy": "channel" if kind.group_size == -1 else "group",
        "group_size": None if kind.group_size == -1 else kind.group_size, "actorder": "group" if kind.act_order else None,
        "dynamic": False, "block_structure": None, "observer": "minmax",
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized" if kind.method == "words" else "int-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def _modules(kind: Kind) -> dict[str, Published]:
    found: dict[str, Published] = {}
    for layer in range(LAYERS):
        for number, (module, (n, k)) in enumerate(SHAPES.items()):
            name, seed = f"model.layers.{layer}.{module}", 10 * layer + number
            source = published(n, k, kind.group_size, kind.bits, seed, symmetric=kind.sym, act_order=kind.act_order)
            source.scales = (source.scales * (0.5 if kind.bits == 4 else 0.03)).astype(source.scales.dtype)
            leaf = module.rpartition(".")[2]
            if leaf in SAME_INPUT and not kind.own_orders:
                source.group_of = found[name.replace(leaf, SAME_INPUT[leaf])].group_of
            found[name] = source
    return found


def _rest(kind: Kind) -> dict[str, Tensor]:
    """Embedding, head, norms and biases, which nobody quantises."""
    dice = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice)

    rest = {"model.embed_tokens.weight": 0.25 * noise(VOCAB, HIDDEN), "model.norm.weight": 1 + 0.1 * noise(HIDDEN)}
    if not kind.tie:
        rest["lm_head.weight"] = 0.25 * noise(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            rest[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.1 * noise(HIDDEN)
        if kind.architecture == "Qwen2ForCausalLM":
            for part in ("q_proj", "k_proj", "v_proj"):
                rest[f"model.layers.{layer}.self_attn.{part}.bias"] = 0.5 * noise(SHAPES[f"self_attn.{part}"][0])
    return rest
