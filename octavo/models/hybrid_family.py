"""What Qwen3.5 and Qwen3-Next share: most layers are recurrent (Gated DeltaNet), every fourth one has attention. It uses no torch.

    linear_attention   x -> norm -> q k v z, b a -> delta net -> output -> + -> norm -> MLP or MoE -> +
    full_attention     x -> norm -> q k v gate -> attention -> * sigmoid(gate) -> output -> + -> norm -> MLP or MoE -> +

Norms are multiplied by 1 + weight, except the one of the delta net. A part of each attention head is rotated. Qwen3.5 has three axes of
positions; in text all three are equal, and that is a plain rotation.

In folders a v head's k head is its number divided by the v heads of a k head. GGUF files of Qwen3.5 have the first v head of all k heads,
then the second of all, so that it is the remainder (`Tiled`).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from octavo.attention.delta_net import DeltaNetSpec
from octavo.attention.mixer import MixerSpec
from octavo.attention.spec import AttentionSpec
from octavo.errors import ConfigError, LoadError
from octavo.model_config import ConfigReader
from octavo.models import dense_family, mixture_family
from octavo.models.dense_family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    FULL,
    QK_NORM_RULES,
    DenseConfig,
    MixerParts,
    attention_parts,
    check_activation,
    dense_config,
    divided_attention,
    divided_mlp,
    gguf_fields,
    gguf_rotated,
    read_fields,
    read_rotated,
    with_defaults,
)
from octavo.models.description import ModelDescription
from octavo.models.family import HeldTogether, Rows, Rule, Rules, vector
from octavo.models.gguf_keys import GGUFKeys
from octavo.models.mixture_family import QWEN_MLP_RULES, gguf_experts, mixture_matrices
from octavo.models.row_order import OfGroup, RowOrder, Tiled
from octavo.models.split import Shared

LINEAR = "linear_attention"
DEFAULTS: dict[str, Any] = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
MOST_HEADS, MOST_DIM, MOST_WIDTH = 4096, 1024, 64

ATTENTION, DELTA = "model.layers.*.self_attn", "model.layers.*.linear_attn"
Q, QKV, Z, B, A = f"{ATTENTION}.q_proj", f"{DELTA}.in_proj_qkv", f"{DELTA}.in_proj_z", f"{DELTA}.in_proj_b", f"{DELTA}.in_proj_a"
Q_GATE = HeldTogether(Q, (f"{Q}.q", f"{Q}.gate"), gguf="blk.*.attn_q")
RULES = (
    EMBEDDING_RULES[0],
    Rule("model.norm", "norm", gguf="output_norm", plus=1.0),
    EMBEDDING_RULES[2],
    Rule("model.layers.*.input_layernorm", "layers.*.attention_norm", gguf="blk.*.attn_norm", plus=1.0),
    Rule("model.layers.*.post_attention_layernorm", "layers.*.mlp_norm", gguf="blk.*.post_attention_norm", plus=1.0),
    Rule(f"{Q}.q", "layers.*.attention.qkv", "q"),
    *ATTENTION_RULES[1:],
    Rule(f"{Q}.gate", "layers.*.attention.qkv", "gate"),
    *(replace(rule, plus=1.0) for rule in QK_NORM_RULES),
    Rule(QKV, "layers.*.delta_net.in_proj", "qkv", gguf="blk.*.attn_qkv"),
    Rule(Z, "layers.*.delta_net.in_proj", "z", gguf="blk.*.attn_gate"),
    Rule(B, "layers.*.delta_net.gates", "b", gguf="blk.*.ssm_beta"),
    Rule(A, "layers.*.delta_net.gates", "a", gguf="blk.*.ssm_alpha"),
    Rule(f"{DELTA}.conv1d", "layers.*.delta_net.conv", gguf="blk.*.ssm_conv1d"),
    Rule(f"{DELTA}.A_log", "layers.*.delta_net.decay", gguf="blk.*.ssm_a", bare=True, negative_exp=True),
    Rule(f"{DELTA}.dt_bias", "layers.*.delta_net.dt_bias", gguf="blk.*.ssm_dt", bare=True),
    Rule(f"{DELTA}.norm", "layers.*.delta_net.norm", gguf="blk.*.ssm_norm"),
    Rule(f"{DELTA}.out_proj", "layers.*.delta_net.output", gguf="blk.*.ssm_out"),
    *QWEN_MLP_RULES,
)


# -- reading a config.json


def read_hybrid(reader: ConfigReader, architecture: str) -> tuple[ConfigReader, dict[str, Any]]:
    """Returns a reader with defaults, and the values for `hybrid_config`. A family adds its MLPs."""
    reader = with_defaults(reader, DEFAULTS)
    check_activation(reader)
    fields = read_fields(reader, architecture)
    parameters = reader.object("rope_parameters") or reader.object("rope_scaling")
    rotated = read_rotated(reader, parameters, fields["head_dim"])
    return reader, fields | {
        "rope": reader.rope(rotated, parameters),
        "rotary_dim": None if rotated == fields["head_dim"] else rotated,
        "qk_norm": "heads",
        "output_gate": True,
        "mlp_bias": False,
        "wide_norms": True,
    }


def hybrid_config(reader: ConfigReader, fields: Mapping[str, Any]) -> DenseConfig:
    """Returns the config, in which recurrent layers have another mixer."""
    plain, types = dense_config(fields), _layer_types(reader, fields["num_layers"])
    if LINEAR not in types:
        return plain
    spec = _delta_net(reader, plain.norm.eps)
    layers = [replace(layer, mixer=spec) if kind == LINEAR else layer for layer, kind in zip(plain.layers, types, strict=True)]
    return replace(plain, layers=tuple(layers))


def _layer_types(reader: ConfigReader, layers: int) -> list[str]:
    types = reader.raw.get("layer_types")
    if types is None:
        interval = reader.integer("full_attention_interval", high=2**16)
        types = [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(kind in (LINEAR, FULL) for kind in types):
        raise reader.fail("layer_types", f"{layers} of {FULL} or {LINEAR}")
    if FULL not in types:
        raise LoadError(f"{reader.source}: none of the {layers} layers is of type {FULL}: a model needs at least one")
    return types


def _delta_net(reader: ConfigReader, norm_eps: float) -> DeltaNetSpec:
    k_heads = reader.integer("linear_num_key_heads", high=MOST_HEADS)
    v_heads = reader.integer("linear_num_value_heads", high=MOST_HEADS)
    if v_heads % k_heads:
        raise LoadError(f"{reader.source}: linear_num_value_heads {v_heads} is not a multiple of linear_num_key_heads {k_heads}")
    return DeltaNetSpec(
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=reader.integer("linear_key_head_dim", high=MOST_DIM),
        v_dim=reader.integer("linear_value_head_dim", high=MOST_DIM),
        conv_width=reader.integer("linear_conv_kernel_dim", low=2, high=MOST_WIDTH),
        norm_eps=norm_eps,
    )


# -- description


def describe(rules: Rules, family: str, config: DenseConfig) -> ModelDescription:
    return dense_family.describe(rules, family, config, mixture_matrices, mixer_parts)


def mixer_parts(rules: Rules, config: DenseConfig, layer: int) -> MixerParts:
    spec, hidden = config.layers[layer].mixer, config.hidden_size
    if not isinstance(spec, DeltaNetSpec):
        return attention_parts(rules, config, layer)
    rows: dict[str, Rows] = {"qkv": spec.sections, "z": spec.v_size}
    heads = {"b": spec.v_heads, "a": spec.v_heads}
    matrices = [
        rules.matrix("delta_in", "layers.*.delta_net.in_proj", rows, hidden, layer, split="rows"),
        rules.matrix("delta_gates", "layers.*.delta_net.gates", heads, hidden, layer, split="rows"),
        rules.matrix("output", "layers.*.delta_net.output", hidden, spec.v_size, layer, split="columns"),
    ]
    own = partial(vector, layer=layer)
    return matrices, [
        own("delta_conv", "layers.*.delta_net.conv", spec.channels * spec.conv_width, sections=spec.sections),
        own("delta_decay", "layers.*.delta_net.decay", spec.v_heads, wide=True),
        own("delta_dt_bias", "layers.*.delta_net.dt_bias", spec.v_heads, wide=True),
        own("delta_norm", "layers.*.delta_net.norm", spec.v_dim),
    ]


def delta_net_of(config: DenseConfig) -> DeltaNetSpec | None:
    return next((layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaNetSpec)), None)


def q_and_gate(config: DenseConfig) -> dict[str, RowOrder]:
    """For `Family.places`: the rows of q and of the gate alternate, head by head."""
    spec = config.attention()
    sizes = (spec.head_dim, spec.head_dim)
    return {module: OfGroup(spec.num_heads, sizes, (part,)) for part, module in enumerate(Q_GATE.modules)}


# -- ranks
#
# A rank has whole v heads with their k heads, and of everything in between: of q, k, v and z, of the convolution, of the gates, and of
# the states. If there are more ranks than k heads, neighbours have the same k head, as they may have the same kv head.


def shared(config: DenseConfig) -> dict[str, Shared]:
    plain = all(layer.mlp.experts is None for layer in config.layers)
    found = dense_family.shared(config) if plain else mixture_family.shared(config, "moe_intermediate_size")
    if (spec := delta_net_of(config)) is not None:
        found["k_heads"] = Shared("linear_num_key_heads", spec.k_heads, repeats=True)
        found["v_heads"] = Shared("linear_num_value_heads", spec.v_heads)
    return found


def divided(config: DenseConfig, own: Mapping[str, int], context: int) -> DenseConfig:
    """Like `dense_family.divided`."""
    if context > 1 and delta_net_of(config) is not None:
        raise ConfigError(
            f"decode_context_parallel_size is {context}, and the model has recurrent layers, whose states cannot be split by tokens: "
            "set it to 1"
        )

    def of_rank(mixer: MixerSpec) -> MixerSpec:
        if isinstance(mixer, DeltaNetSpec):
            return replace(mixer, k_heads=own["k_heads"], v_heads=own["v_heads"])
        return divided_attention(cast(AttentionSpec, mixer), own, context)

    layers = (replace(layer, mixer=of_rank(layer.mixer), mlp=divided_mlp(layer.mlp, own)) for layer in config.layers)
    return replace(config, layers=tuple(layers))


# -- GGUF files


def gguf_config(keys: GGUFKeys) -> dict[str, Any]:
    experts = keys.integer("expert_count", 0, low=0) > 0
    fields = gguf_fields(keys, head_dim=False, experts=experts)
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        raise keys.fail(f"{keys.prefix}ssm.inner_size", f"a multiple of {keys.prefix}ssm.time_step_rank {heads}")
    config = fields | gguf_rotated(keys, fields) | {
        "full_attention_interval": keys.integer("full_attention_interval", DEFAULTS["full_attention_interval"]),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "attention_bias": any(name.endswith("attn_q.bias") for name in keys.shapes),
    }
    if not experts:
        return config
    chosen, shared_gate = gguf_experts(keys), keys.shapes.get("blk.0.ffn_gate_shexp.weight", (0,))
    own = {"num_experts": chosen["num_local_experts"], "norm_topk_prob": True, "shared_expert_intermediate_size": shared_gate[0]}
    return config | chosen | own


def tiled_rows(architecture: str, config: Mapping[str, Any]) -> dict[str, RowOrder]:
    """For `GGUFForm`: the order of v heads, in all tensors that have rows of them."""
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if v_heads % k_heads or v_heads == k_heads:  # refused later, or in the same order
        return {}
    tiled = Tiled(k_heads, v_heads // k_heads)
    behind_k = replace(tiled, before=2 * k_heads * config["linear_key_head_dim"])
    words = ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")
    return {**dict.fromkeys(words, tiled), "attn_qkv": behind_k, "ssm_conv1d": behind_k}


def tiled_columns(architecture: str, config: Mapping[str, Any]) -> dict[str, RowOrder]:
    """For `GGUFForm`: the same, in the tensor that has columns of them."""
    order = tiled_rows(architecture, config).get("attn_gate")
    return {} if order is None else {"ssm_out": order}
