"""The smallest quantised model that opens, as bytes: AWQ or GPTQ in groups of 32, all of its weights zero."""

import json
from typing import Any

from tests.support import tiny_files as tiny

HIDDEN = 32
CONFIG = tiny.CONFIG | {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_key_value_heads": 2}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
LAYER = "model.layers.0."
MODULES = {  # output rows, input columns
    "self_attn.q_proj": (8, 32), "self_attn.k_proj": (8, 32), "self_attn.v_proj": (8, 32), "self_attn.o_proj": (32, 8),
    "mlp.gate_proj": (32, 32), "mlp.up_proj": (32, 32), "mlp.down_proj": (32, 32),
}  # fmt: skip
Shapes = dict[str, tuple[str, list[int]]]  # dtype and shape
ITEM_BYTES = {"F32": 4, "I32": 4, "F16": 2, "I64": 8}


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
        found[f"{module}.qweight"] = ("I32", [k, n // 8] if method == "awq" else [k // 8, n])
        found[f"{module}.qzeros"], found[f"{module}.scales"] = ("I32", [1, n // 8]), ("F16", [1, n])
        if method == "gptq":
            found[f"{module}.g_idx"] = ("I32", [k])
    return found


def safetensors(described: Shapes) -> bytes:
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in described.items():
        size = ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return tiny.safetensors_bytes(header, bytes(end))


def quantized_files(method: str = "awq") -> dict[str, bytes]:
    config = CONFIG | {"quantization_config": AWQ if method == "awq" else GPTQ}
    return tiny.folder_files() | {"config.json": json.dumps(config).encode(), "model.safetensors": safetensors(shapes(method))}


def gptq_files() -> dict[str, bytes]:
    return quantized_files("gptq")
