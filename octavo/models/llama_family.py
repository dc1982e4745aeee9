"""Llama, Mistral and Ministral: the plain decoder. No torch here.

    Llama   no windows      Mistral   a window on every layer, if the config has one      Ministral   on the layers in the config

GGUF files of all three have the architecture `llama`, and do not mention windows.
"""

from octavo.model_config import ConfigReader
from octavo.models.dense_family import (
    SLIDING,
    DenseConfig,
    check_activation,
    dense_config,
    dense_family,
    gguf_fields,
    interleaved_qk,
    layer_windows,
    read_fields,
    read_layer_types,
    with_defaults,
)
from octavo.models.family import GGUFForm

LLAMA, MISTRAL, MINISTRAL = "LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM"


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    check_activation(reader)
    fields = read_fields(reader, architecture)
    fields |= {"rope": reader.rope(fields["head_dim"])}
    if architecture == LLAMA:
        return dense_config(fields)
    layers, windowed = fields["num_layers"], with_defaults(reader, {"sliding_window": 4096})
    types = [SLIDING] * layers if architecture == MISTRAL else read_layer_types(reader, layers, lambda _: True)
    return dense_config(fields | {"windows": layer_windows(windowed, types), "gives_back": True})


FAMILY = dense_family("llama", (LLAMA, MISTRAL, MINISTRAL), read, GGUFForm({"llama": LLAMA}, gguf_fields, interleaved_qk(["llama"])))
