"""Gemma 2 and the text part of Gemma 3. No torch here.

    norms before and after each sub-layer, with weights that are stored minus 1; GELU; a scaled embedding

    Gemma 2   scores and logits are capped; every other layer has a window
    Gemma 3   norms on the heads of q and k; five of six layers have a window, and their own rotation

A checkpoint for images and text has its text part under another prefix. Its other weights are left out on purpose.
"""

from typing import Any

from octavo.model_config import ROPE_THETAS, ConfigReader
from octavo.models.dense_family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    FULL,
    MLP_RULES,
    QK_NORM_RULES,
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
from octavo.models.family import GGUFForm, Rule, Rules
from octavo.models.gguf_keys import GGUFKeys

GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES = "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"
GELU = "gelu_pytorch_tanh"
DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
DEFAULTS2 = DEFAULTS | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
DEFAULTS3 = DEFAULTS | {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
OF_THE_WHOLE = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")  # outside the text part of the config
CAPS = (1e-3, 1e6)
LARGEST2, LARGEST3 = 46, 62  # layers of the 27B models, which scale scores differently: GGUF files do not contain this
PATTERN2 = 2

RULES = Rules(
    [
        *EMBEDDING_RULES[:1],
        Rule("model.norm", "norm", gguf="output_norm", plus=1.0),
        EMBEDDING_RULES[2],
        Rule("model.layers.*.input_layernorm", "layers.*.attention_norm", gguf="blk.*.attn_norm", plus=1.0),
        *ATTENTION_RULES,
        *(Rule(rule.checkpoint, rule.module, gguf=rule.gguf, plus=1.0) for rule in QK_NORM_RULES),
        Rule("model.layers.*.post_attention_layernorm", "layers.*.attention_after_norm", gguf="blk.*.post_attention_norm", plus=1.0),
        Rule("model.layers.*.pre_feedforward_layernorm", "layers.*.mlp_norm", gguf="blk.*.ffn_norm", plus=1.0),
        *MLP_RULES,
        Rule("model.layers.*.post_feedforward_layernorm", "layers.*.mlp_after_norm", gguf="blk.*.post_ffw_norm", plus=1.0),
    ],
    prefixes={"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."},
    left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    if architecture == GEMMA3_WITH_IMAGES:
        whole = {key: reader.raw[key] for key in OF_THE_WHOLE if reader.raw.get(key) is not None}
        reader = ConfigReader(reader.object("text_config") | whole, f"{reader.source}: text_config")
    reader = with_defaults(reader, DEFAULTS2 if architecture == GEMMA2 else DEFAULTS3)
    check_activation(reader, GELU, "hidden_activation")
    if reader.flag("use_bidirectional_attention", False):
        raise reader.fail("use_bidirectional_attention", "false")
    fields = read_fields(reader, architecture)
    pattern = PATTERN2 if architecture == GEMMA2 else reader.integer("sliding_window_pattern", high=2**16)
    types = read_layer_types(reader, fields["num_layers"], lambda layer: (layer + 1) % pattern != 0)
    fields |= {"rope": reader.rope(fields["head_dim"])} if architecture == GEMMA2 else _two_rotations(reader, fields["head_dim"], types)
    own = {
        "windows": layer_windows(reader, types),
        "scale": reader.number("query_pre_attn_scalar", 256, 1e-6, 1e6) ** -0.5,
        "soft_cap": _cap(reader, "attn_logit_softcapping"),
        "logit_cap": _cap(reader, "final_logit_softcapping"),
        "norms": "both",
        "wide_norms": True,
        "activation": "geglu",
        "embedding_scale": fields["hidden_size"] ** 0.5,
    }
    return dense_config(fields | own)


def _cap(reader: ConfigReader, key: str) -> float | None:
    return None if reader.raw.get(key) is None else reader.number(key, 1.0, *CAPS)


def _two_rotations(reader: ConfigReader, head_dim: int, types: list[str]) -> dict[str, Any]:
    """Layers with a window have their own rotation, even if the window is longer than any sequence."""
    thetas = reader.number("rope_theta", GLOBAL_THETA, *ROPE_THETAS), reader.number("rope_local_base_freq", LOCAL_THETA, *ROPE_THETAS)
    given = reader.object("rope_parameters")
    everywhere, nearby = given.get(FULL) or reader.object("rope_scaling"), given.get(SLIDING) or {}
    rope, local = (reader.rope(head_dim, *one) for one in ((everywhere, thetas[0]), (nearby, thetas[1])))
    return {"ropes": [local if kind == SLIDING else rope for kind in types], "qk_norm": "heads"}


def _gguf_config2(keys: GGUFKeys) -> dict[str, Any]:
    return _gguf_config(keys, LARGEST2) | {
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gguf_config3(keys: GGUFKeys) -> dict[str, Any]:
    config = _gguf_config(keys, LARGEST3)
    slides = keys.has("attention.sliding_window")
    pattern = keys.integer("attention.sliding_window_pattern", 6) if slides else 1
    capped = {"final_logit_softcapping": keys.number("final_logit_softcapping")} if keys.has("final_logit_softcapping") else {}
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", LOCAL_THETA)}
    return config | capped | {
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "layer_types": [SLIDING if (layer + 1) % pattern else FULL for layer in range(keys.num_layers())],
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
    }


def _gguf_config(keys: GGUFKeys, largest: int) -> dict[str, Any]:
    config = gguf_fields(keys, windowed=True)
    head_dim = config.get("head_dim") or keys.integer("embedding_length") // config["num_attention_heads"]
    scalar = keys.integer("embedding_length") // config["num_attention_heads"] if keys.num_layers() == largest else head_dim
    return config | {"head_dim": head_dim, "query_pre_attn_scalar": scalar}


def _gguf(keys: GGUFKeys) -> dict[str, Any]:
    return _gguf_config2(keys) if keys.prefix == "gemma2." else _gguf_config3(keys)


FAMILY = dense_family(
    "gemma",
    (GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES),
    read,
    GGUFForm({"gemma2": GEMMA2, "gemma3": GEMMA3}, _gguf, interleaved_qk([])),
    rules=RULES,
)
