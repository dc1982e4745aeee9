"""Phi-3, Phi-3.5 and Phi-4 (mini), without experts. It uses no torch.

    q, k and v are one weight of the checkpoint, and so are gate and up
    a part of each head may be rotated; each frequency may have its own factor, for short and for long contexts (longrope)
    every layer has a window, if the config has one
"""

from typing import Any

from octavo.model_config import ConfigReader
from octavo.models.dense_family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    MLP_RULES,
    NORM_RULES,
    SLIDING,
    DenseConfig,
    check_activation,
    dense_config,
    dense_family,
    gguf_fields,
    gguf_rotated,
    interleaved_qk,
    layer_windows,
    read_fields,
    read_rotated,
    with_defaults,
)
from octavo.models.family import GGUFForm, Rule, Rules
from octavo.models.gguf_keys import GGUFKeys

PHI3 = "Phi3ForCausalLM"
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
OLD_NAMES = ("su", "yarn")  # names of longrope in early files

RULES = Rules(
    [
        *EMBEDDING_RULES,
        *NORM_RULES,
        Rule("model.layers.*.self_attn.qkv_proj", "layers.*.attention.qkv", gguf="blk.*.attn_qkv"),
        ATTENTION_RULES[-1],
        Rule("model.layers.*.mlp.gate_up_proj", "layers.*.mlp.gate_up", gguf="blk.*.ffn_up"),
        MLP_RULES[-1],
    ]
)


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    reader = with_defaults(reader, DEFAULTS)
    check_activation(reader)
    fields = read_fields(reader, architecture)
    parameters = reader.object("rope_parameters") or reader.object("rope_scaling")
    kind = parameters.get("rope_type") or parameters.get("type")
    parameters |= {"rope_type": "longrope" if kind in OLD_NAMES else kind}
    rotated = read_rotated(reader, parameters, fields["head_dim"])
    rotation = {"rope": reader.rope(rotated, parameters), "rotary_dim": None if rotated == fields["head_dim"] else rotated}
    windows = layer_windows(reader, [SLIDING] * fields["num_layers"])
    return dense_config(fields | rotation | {"windows": windows, "gives_back": True})


def _gguf_config(keys: GGUFKeys) -> dict[str, Any]:
    config = gguf_fields(keys, windowed=True, head_dim=False)
    window = keys.integer("attention.sliding_window", 0, low=0)  # 0 means none
    return config | gguf_rotated(keys, config) | {"sliding_window": window or None}


FAMILY = dense_family("phi", (PHI3,), read, GGUFForm({"phi3": PHI3}, _gguf_config, interleaved_qk([])), rules=RULES)
