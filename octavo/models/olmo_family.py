"""OLMo 2: norms after each sub-layer and none before; q and k are normed over all their heads together. It uses no torch."""

from octavo.model_config import ConfigReader
from octavo.models.dense_family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    MLP_RULES,
    QK_NORM_RULES,
    DenseConfig,
    check_activation,
    dense_config,
    dense_family,
    gguf_fields,
    interleaved_qk,
    read_fields,
    with_defaults,
)
from octavo.models.family import GGUFForm, Rule, Rules

OLMO2 = "Olmo2ForCausalLM"

RULES = Rules(
    [
        *EMBEDDING_RULES,
        *ATTENTION_RULES,
        *QK_NORM_RULES,
        Rule("model.layers.*.post_attention_layernorm", "layers.*.attention_after_norm", gguf="blk.*.post_attention_norm"),
        *MLP_RULES,
        Rule("model.layers.*.post_feedforward_layernorm", "layers.*.mlp_after_norm", gguf="blk.*.post_ffw_norm"),
    ]
)


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    reader = with_defaults(reader, {"rms_norm_eps": 1e-5})
    check_activation(reader)
    fields = read_fields(reader, architecture) | {"qk_norm": "whole", "norms": "after", "wide_norms": True}
    return dense_config(fields | {"rope": reader.rope(fields["head_dim"])})


FAMILY = dense_family(
    "olmo",
    (OLMO2,),
    read,
    GGUFForm({"olmo2": OLMO2}, gguf_fields, interleaved_qk([])),
    rules=RULES,
    unshared="its norms of q and k are over the heads of all ranks",
)
