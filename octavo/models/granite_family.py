"""Granite 3, without experts: the plain decoder, with factors on the embedding, the outputs of sub-layers, scores and logits."""

from typing import Any

from octavo.model_config import ConfigReader
from octavo.models.dense_family import (
    DenseConfig,
    check_activation,
    dense_config,
    dense_family,
    gguf_fields,
    interleaved_qk,
    read_fields,
)
from octavo.models.family import GGUFForm
from octavo.models.gguf_keys import GGUFKeys

GRANITE = "GraniteForCausalLM"
SCALES = (1e-6, 1e6)


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    check_activation(reader)
    fields = read_fields(reader, architecture)
    scales = {
        "scale": reader.number("attention_multiplier", 1.0, *SCALES),
        "embedding_scale": reader.number("embedding_multiplier", 1.0, *SCALES),
        "residual_scale": reader.number("residual_multiplier", 1.0, *SCALES),
        "logit_scale": 1 / reader.number("logits_scaling", 1.0, *SCALES),
    }
    return dense_config(fields | scales | {"rope": reader.rope(fields["head_dim"])})


def _gguf_config(keys: GGUFKeys) -> dict[str, Any]:
    if keys.metadata.get(rotates := f"{keys.prefix}rope.scaling.finetuned", True) is not True:  # in these files, a switch of the rotation
        raise keys.fail(rotates, "absent or true")
    config = gguf_fields(keys)
    head_dim = config.get("head_dim") or keys.integer("embedding_length") // config["num_attention_heads"]
    return config | {
        "attention_multiplier": keys.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale"),
    }


FAMILY = dense_family("granite", (GRANITE,), read, GGUFForm({"granite": GRANITE}, _gguf_config, interleaved_qk(["granite"])))
