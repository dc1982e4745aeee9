"""Qwen2 and Qwen3, without experts. It uses no torch.

    Qwen2   biases on q, k, v         Qwen3   norms on the heads of q and k         both   a window on some layers, if configured
"""

from octavo.model_config import ConfigReader
from octavo.models.dense_family import (
    DenseConfig,
    check_activation,
    dense_config,
    dense_family,
    gguf_fields,
    interleaved_qk,
    layer_windows,
    read_fields,
    read_layer_types,
)
from octavo.models.family import GGUFForm

QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    check_activation(reader)
    fields = read_fields(reader, architecture)
    if architecture == QWEN2:
        fields |= {"qkv_bias": True, "output_bias": False}
    if architecture == QWEN3:
        fields |= {"qk_norm": "heads"}
    if reader.flag("use_sliding_window", False) and reader.raw.get("sliding_window") is not None:
        first = reader.integer("max_window_layers", 28, low=0)  # for files without `layer_types`
        types = read_layer_types(reader, fields["num_layers"], lambda layer: layer >= first)
        fields |= {"windows": layer_windows(reader, types)}
    return dense_config(fields | {"rope": reader.rope(fields["head_dim"])})


FAMILY = dense_family("qwen", (QWEN2, QWEN3), read, GGUFForm({"qwen2": QWEN2, "qwen3": QWEN3}, gguf_fields, interleaved_qk([])))
