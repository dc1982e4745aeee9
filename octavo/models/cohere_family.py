"""Cohere's Command-R and Command-R7B (Cohere 2). It uses no torch.

    one layer norm without a bias, which attention and the MLP read in parallel; a scaled, tied head; interleaved rotation

    Cohere 2   most layers have a window and a rotation; the others see everything and have no rotation
"""

from typing import Any

from octavo.model_config import NORM_EPSILONS, ConfigReader
from octavo.models.dense_family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    FULL,
    MLP_RULES,
    NORM_RULES,
    SLIDING,
    DenseConfig,
    check_activation,
    dense_config,
    dense_family,
    gguf_fields,
    interleaved_qk,
    interleaved_rows,
    layer_windows,
    read_fields,
    read_layer_types,
    with_defaults,
)
from octavo.models.description import NormShape
from octavo.models.family import GGUFForm, Rules
from octavo.models.gguf_keys import GGUFKeys

COHERE, COHERE2 = "CohereForCausalLM", "Cohere2ForCausalLM"
DEFAULTS: dict[str, Any] = {"logit_scale": 0.0625, "max_position_embeddings": 8192, "tie_word_embeddings": True}
SCALES = (1e-6, 1e6)
PATTERN = 4  # of Cohere 2: every fourth layer sees everything

RULES = Rules([*EMBEDDING_RULES, NORM_RULES[0], *ATTENTION_RULES, *MLP_RULES])


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    own: dict[str, dict[str, Any]] = {COHERE: {"rope_theta": 500000.0}, COHERE2: {"sliding_window": 4096}}
    reader = with_defaults(reader, DEFAULTS | own[architecture])
    check_activation(reader)
    if reader.flag("use_qk_norm", False):
        raise reader.fail("use_qk_norm", "false: layer norms on the heads of q and k are not supported")
    fields = read_fields(reader, architecture)
    fields |= {
        "norm": NormShape(reader.number("layer_norm_eps", 1e-5, *NORM_EPSILONS), "layer"),
        "rope": reader.rope(fields["head_dim"]),
        "parallel": True,
        "logit_scale": reader.number("logit_scale", 1.0, *SCALES),
    }
    if architecture == COHERE2:
        pattern = reader.integer("sliding_window_pattern", PATTERN, high=2**16)
        types = read_layer_types(reader, fields["num_layers"], lambda layer: (layer + 1) % pattern != 0)
        ropes = [fields["rope"] if kind == SLIDING else None for kind in types]
        fields |= {"windows": layer_windows(reader, types), "ropes": ropes}
    return dense_config(fields)


def _gguf(keys: GGUFKeys) -> dict[str, Any]:
    config = gguf_fields(keys, windowed=True, layer_norms=True) | {"logit_scale": keys.number("logit_scale")}
    if keys.prefix == "command-r.":
        return config
    types = [SLIDING if (layer + 1) % PATTERN else FULL for layer in range(keys.num_layers())]
    return config | {"sliding_window": keys.integer("attention.sliding_window"), "layer_types": types}


FORMS = {"command-r": COHERE, "cohere2": COHERE2}
FAMILY = dense_family(
    "cohere", (COHERE, COHERE2), read, GGUFForm(FORMS, _gguf, interleaved_qk([*FORMS])), rules=RULES, orders=interleaved_rows
)
