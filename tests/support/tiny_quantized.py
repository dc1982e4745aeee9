"""The smallest quantised models that open, as bytes: AWQ, GPTQ, FP8 and words of 4 bits in groups of 32, all of their weights zero."""

import json
import os
from math import prod
from pathlib import Path
from typing import Any

from tests.support import tiny_files as tiny

HIDDEN = 32
CONFIG = tiny.CONFIG | {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_key_value_heads": 2}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WORDS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}},
}  # fmt: skip
CONFIGS = {"awq": AWQ, "gptq": GPTQ, "fp8": FP8, "words": WORDS}
LAYER = "model.layers.0."
MODULES = {  # output rows, input columns
    "self_attn.q_proj": (8, 32), "self_attn.k_proj": (8, 32), "self_attn.v_proj": (8, 32), "self_attn.o_proj": (32, 8),
    "mlp.gate_proj": (32, 32), "mlp.up_proj": (32, 32), "mlp.down_proj": (32, 32),
}  # fmt: skip
Shapes = dict[str, tuple[str, list[int]]]  # dtype and shape
ITEM_BYTES = {"F32": 4, "I32": 4, "F16": 2, "I64": 8, "F8_E4M3": 1, "F8_E5M2": 1}


def shapes(method: str) -> Shapes:
    """The rows of o_proj are no whole group: it stays floats, as modules_to_not_convert may say."""
    found: Shapes = {"model.embed_tokens.weight": ("F32", [tiny.VOCAB, HIDDEN])}
    for norm in ("model.norm", f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm"):
        found[f"{norm}.weight"] = ("F32", [HIDDEN])
    for name, (n, k) in MODULES.items():
        module = LAYER + name
        if name == "self_attn.o_proj":
            found[f"{module}.weight"] = ("F32", [n, k])
            continue
        if method == "fp8":
            found[f"{module}.weight"], found[f"{module}.weight_scale_inv"] = ("F8_E4M3", [n, k]), ("F32", [1, 1])
            continue
        if method == "words":
            found[f"{module}.weight_packed"], found[f"{module}.weight_scale"] = ("I32", [n, k // 8]), ("F16", [n, 1])
            continue
        found[f"{module}.qweight"] = ("I32", [k, n // 8] if method == "awq" else [k // 8, n])
        found[f"{module}.qzeros"], found[f"{module}.scales"] = ("I32", [1, n // 8]), ("F16", [1, n])
        if method == "gptq":
            found[f"{module}.g_idx"] = ("I32", [k])
    return found


def safetensors(described: Shapes) -> bytes:
    header, size = layout(described)
    return tiny.safetensors_bytes(header, bytes(size))


def write_safetensors(path: Path, described: Shapes) -> None:
    """Writes the same with a hole for its zeros: described tensors may have gigabytes."""
    header, size = layout(described)
    path.write_bytes(tiny.safetensors_bytes(header, b""))
    os.truncate(path, path.stat().st_size + size)


def layout(described: Shapes) -> tuple[dict[str, Any], int]:
    """Returns the header of a file, and how many bytes follow it."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in described.items():
        size = ITEM_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header, end


def quantized_files(method: str = "awq") -> dict[str, bytes]:
    config = CONFIG | {"quantization_config": CONFIGS[method]}
    return tiny.folder_files() | {"config.json": json.dumps(config).encode(), "model.safetensors": safetensors(shapes(method))}


def gptq_files() -> dict[str, bytes]:
    return quantized_files("gptq")


def fp8_files() -> dict[str, bytes]:
    return quantized_files("fp8")


def words_files() -> dict[str, bytes]:
    return quantized_files("words")
