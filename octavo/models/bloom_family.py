"""BLOOM: ALiBi instead of a rotation, layer norms with biases, also on the embedding, and an MLP without a gate. It uses no torch.

q, k and v are one weight, head by head in folders. Some folders leave out the prefix `transformer.` of names.
"""

from typing import Any

from octavo.model_config import NORM_EPSILONS, ConfigReader
from octavo.models.dense_family import DenseConfig, dense_config, dense_family, interleaved_qk, read_fields, with_defaults
from octavo.models.description import NormShape
from octavo.models.family import GGUFForm, Rule, Rules
from octavo.models.gguf_keys import GGUFKeys
from octavo.models.row_order import ByHead, RowOrder

BLOOM = "BloomForCausalLM"
QKV = "transformer.h.*.self_attention.query_key_value"
NAMES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embed": "hidden_size", "seq_length": "max_position_embeddings"}
DEFAULTS: dict[str, Any] = {"tie_word_embeddings": True}

RULES = Rules(
    [
        Rule("transformer.word_embeddings", "embed", gguf="token_embd"),
        Rule("transformer.word_embeddings_layernorm", "embedding_norm", gguf="token_embd_norm"),
        Rule("transformer.ln_f", "norm", gguf="output_norm"),
        Rule("lm_head", "head", gguf="output"),
        Rule("transformer.h.*.input_layernorm", "layers.*.attention_norm", gguf="blk.*.attn_norm"),
        Rule(QKV, "layers.*.attention.qkv", gguf="blk.*.attn_qkv"),
        Rule("transformer.h.*.self_attention.dense", "layers.*.attention.output", gguf="blk.*.attn_output"),
        Rule("transformer.h.*.post_attention_layernorm", "layers.*.mlp_norm", gguf="blk.*.ffn_norm"),
        Rule("transformer.h.*.mlp.dense_h_to_4h", "layers.*.mlp.gate_up", "up", gguf="blk.*.ffn_up"),
        Rule("transformer.h.*.mlp.dense_4h_to_h", "layers.*.mlp.down", gguf="blk.*.ffn_down"),
    ],
    prefixes={name: f"transformer.{name}" for name in ("h.", "word_embeddings", "ln_f.")},
)


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    named = {common: reader.raw[own] for own, common in NAMES.items() if reader.raw.get(own) is not None}
    reader = with_defaults(ConfigReader({**reader.raw, **named}, reader.source), DEFAULTS)
    if reader.flag("apply_residual_connection_post_layernorm", False):
        raise reader.fail("apply_residual_connection_post_layernorm", "false")
    width = {"intermediate_size": 4 * reader.integer("hidden_size", high=2**20)}
    fields = read_fields(with_defaults(reader, width), architecture)
    norm = NormShape(reader.number("layer_norm_epsilon", 1e-5, *NORM_EPSILONS), "layer", bias=True)
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
    return dense_config(fields | biases | {"norm": norm, "alibi": True, "normed_embedding": True, "activation": "gelu"})


def _orders(config: DenseConfig) -> dict[str, RowOrder]:
    return {QKV: ByHead(config.attention().num_heads)}


def _gguf(keys: GGUFKeys) -> dict[str, Any]:
    return {
        "num_attention_heads": keys.integer("attention.head_count"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


FAMILY = dense_family("bloom", (BLOOM,), read, GGUFForm({"bloom": BLOOM}, _gguf, interleaved_qk([])), rules=RULES, orders=_orders)
