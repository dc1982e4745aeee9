"""SmolLM3: the plain decoder, with some layers without rotation, which may have a window. It uses no torch."""

from typing import Any

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
    with_defaults,
)
from octavo.models.family import GGUFForm

SMOLLM3 = "SmolLM3ForCausalLM"
DEFAULTS: dict[str, Any] = {"rope_theta": 2e6, "tie_word_embeddings": True, "max_position_embeddings": 32768}


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    reader = with_defaults(reader, DEFAULTS)
    check_activation(reader)
    fields = read_fields(reader, architecture)
    rotates, rope = _rotates(reader, fields["num_layers"]), reader.rope(fields["head_dim"])
    if reader.flag("use_sliding_window", False):
        types = read_layer_types(reader, fields["num_layers"], lambda layer: not rotates[layer])
        fields |= {"windows": layer_windows(reader, types), "gives_back": True}
    return dense_config(fields | {"ropes": [rope if there else None for there in rotates]})


def _rotates(reader: ConfigReader, layers: int) -> list[bool]:
    """Returns which layers rotate. In `no_rope_layers` 1 means a rotation; without it, every n-th layer has none."""
    listed = reader.raw.get("no_rope_layers")
    if listed is None:
        interval = reader.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or not all(type(one) is int and one in (0, 1) for one in listed):
        raise reader.fail("no_rope_layers", f"at least {layers} of 0 or 1")
    return [one == 1 for one in listed[:layers]]


FAMILY = dense_family("smollm", (SMOLLM3,), read, GGUFForm({"smollm3": SMOLLM3}, gguf_fields, interleaved_qk(["smollm3"])))
