"""GLM-4 of April 2025 (0414): norms before and after each sub-layer, and interleaved rotation of a part of each head. It uses no torch."""

from typing import Any

from octavo.model_config import ConfigReader
from octavo.models.dense_family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    MLP_RULES,
    DenseConfig,
    check_activation,
    dense_config,
    dense_family,
    gguf_fields,
    gguf_rotated,
    interleaved_qk,
    interleaved_rows,
    read_fields,
    read_rotated,
    with_defaults,
)
from octavo.models.family import GGUFForm, Rule, Rules
from octavo.models.gguf_keys import GGUFKeys

GLM4 = "Glm4ForCausalLM"
DEFAULTS = {"attention_bias": True, "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5}

RULES = Rules(
    [
        *EMBEDDING_RULES,
        Rule("model.layers.*.input_layernorm", "layers.*.attention_norm", gguf="blk.*.attn_norm"),
        *ATTENTION_RULES,
        Rule("model.layers.*.post_self_attn_layernorm", "layers.*.attention_after_norm", gguf="blk.*.post_attention_norm"),
        Rule("model.layers.*.post_attention_layernorm", "layers.*.mlp_norm", gguf="blk.*.ffn_norm"),
        Rule("model.layers.*.mlp.gate_up_proj", "layers.*.mlp.gate_up", gguf="blk.*.ffn_up"),
        MLP_RULES[-1],
        Rule("model.layers.*.post_mlp_layernorm", "layers.*.mlp_after_norm", gguf="blk.*.post_ffw_norm"),
    ]
)


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    reader = with_defaults(reader, DEFAULTS)
    check_activation(reader)
    fields = read_fields(reader, architecture) | {"output_bias": False, "norms": "both"}
    parameters = reader.object("rope_parameters") or reader.object("rope_scaling")
    rotated = read_rotated(reader, parameters, fields["head_dim"])
    rotation = {"rope": reader.rope(rotated, parameters), "rotary_dim": None if rotated == fields["head_dim"] else rotated}
    return dense_config(fields | rotation)


def _gguf(keys: GGUFKeys) -> dict[str, Any]:
    config = gguf_fields(keys, head_dim=False)
    return config | gguf_rotated(keys, config)


FAMILY = dense_family("glm", (GLM4,), read, GGUFForm({"glm4": GLM4}, _gguf, interleaved_qk(["glm4"])), rules=RULES, orders=interleaved_rows)
