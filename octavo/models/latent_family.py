"""What DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash share: multi-head latent attention (MLA), and experts in groups. It uses no torch.

    x -> norm -> latents of q and of k and v -> norm -> attention -> output -> + -> norm -> MLP or MoE -> +

The first layers have plain MLPs. In MoE layers one more MLP computes every token, without a gate of its own. Published files have the
rotated rows in interleaved order, at the end of each head of q, and of the latent's projection.

In folders `kv_b_proj` has the rows of k and v of each head, one after the other. They are read as two modules. GGUF files have either
the same, or the two as tensors of their own.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.attention.spec import Latent
from octavo.errors import ConfigError, LoadError
from octavo.model_config import ConfigReader, RopeConfig
from octavo.models import dense_family, mixture_family
from octavo.models.dense_family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    MLP_RULES,
    MODEL,
    NORM_RULES,
    DenseConfig,
    MixerParts,
    check_activation,
    cut,
    read_fields,
)
from octavo.models.description import Experts, MLPShape, ModelDescription, Scores, Vector
from octavo.models.family import MAX_EXPERTS, Family, GGUFForm, HeldTogether, Rule, Rules, vector
from octavo.models.gguf_keys import GGUFKeys
from octavo.models.mixture_family import MLP, MOST_OF_ALL_LAYERS, deal, expert_rules, mixture_matrices
from octavo.models.row_order import Interleaved, OfGroup, RowOrder
from octavo.models.split import Shared

ATTENTION, SHARED = "model.layers.*.self_attn", f"{MLP}.shared_experts"
Q, Q_B, KV_A, KV_B = (f"{ATTENTION}.{name}" for name in ("q_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
K_AND_V = HeldTogether(KV_B, (f"{KV_B}.k", f"{KV_B}.v"), gguf="blk.*.attn_kv_b")
RULES = (
    *EMBEDDING_RULES,
    *NORM_RULES,
    Rule(Q, "layers.*.attention.down", "q", gguf="blk.*.attn_q"),
    Rule(f"{ATTENTION}.q_a_proj", "layers.*.attention.down", "q_latent", gguf="blk.*.attn_q_a"),
    Rule(f"{ATTENTION}.q_a_layernorm", "layers.*.attention.q_norm", gguf="blk.*.attn_q_a_norm"),
    Rule(Q_B, "layers.*.attention.q_up", gguf="blk.*.attn_q_b"),
    Rule(KV_A, "layers.*.attention.down", "kv", gguf="blk.*.attn_kv_a_mqa"),
    Rule(f"{ATTENTION}.kv_a_layernorm", "layers.*.attention.kv_norm", gguf="blk.*.attn_kv_a_norm"),
    Rule(K_AND_V.modules[0], "layers.*.attention.k_up", gguf="blk.*.attn_k_b"),
    Rule(K_AND_V.modules[1], "layers.*.attention.v_up", gguf="blk.*.attn_v_b"),
    ATTENTION_RULES[-1],
    *MLP_RULES,
    *expert_rules(f"{MLP}.gate", f"{MLP}.experts", "gate_proj", "up_proj", "down_proj"),
    Rule(f"{MLP}.gate.e_score_correction_bias", "layers.*.mlp.expert_bias", gguf="blk.*.exp_probs_b", bare=True),
    Rule(f"{SHARED}.gate_proj", "layers.*.mlp.shared.gate_up", "gate", gguf="blk.*.ffn_gate_shexp"),
    Rule(f"{SHARED}.up_proj", "layers.*.mlp.shared.gate_up", "up", gguf="blk.*.ffn_up_shexp"),
    Rule(f"{SHARED}.down_proj", "layers.*.mlp.shared.down", gguf="blk.*.ffn_down_shexp"),
)
FIXED = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "rope_interleave": True}  # the only supported values
MOST_DIM = 4096


# -- reading a config.json


def read_latent(reader: ConfigReader, architecture: str, defaults: Mapping[str, Any]) -> tuple[ConfigReader, dict[str, Any]]:
    """Returns a reader with a family's default values, and the values for `dense_config`. The family adds its MLPs."""
    reader = ConfigReader({**defaults, **{key: value for key, value in reader.raw.items() if value is not None}}, reader.source)
    check_activation(reader)
    check_fixed(reader, FIXED)
    heads, rotated = reader.integer("num_attention_heads", high=65536), reader.integer("qk_rope_head_dim", high=MOST_DIM)
    if reader.integer("num_key_value_heads", heads) != heads:
        raise reader.fail("num_key_value_heads", f"num_attention_heads {heads}, since latents have no heads")
    if rotated % 2:
        raise reader.fail("qk_rope_head_dim", "even")
    fields = read_fields(ConfigReader(reader.raw | {"head_dim": rotated}, reader.source), architecture)
    rope = reader.rope(rotated)
    rank = reader.integer("kv_lora_rank", high=MOST_DIM)
    q_rank = None if reader.raw.get("q_lora_rank") is None else reader.integer("q_lora_rank", high=2**16)
    plain = reader.integer("qk_nope_head_dim", high=MOST_DIM)
    return reader, fields | {
        "num_kv_heads": 1,
        "head_dim": rank + rotated,
        "rotary_dim": rotated,
        "latent": Latent(q_rank, plain, reader.integer("v_head_dim", high=MOST_DIM)),
        "rope": rope,
        "scale": (plain + rotated) ** -0.5 * _score_scale(rope),
    }


def check_fixed(reader: ConfigReader, wanted: Mapping[str, Any]) -> None:
    """Refuses other values of these keys, if they are there."""
    for key, value in wanted.items():
        if reader.raw.get(key) not in (None, value):
            raise reader.fail(key, repr(value) if isinstance(value, str) else str(value).lower())


def _score_scale(rope: RopeConfig) -> float:
    """Returns the factor on scores for a longer context: once for q and once for k."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2


def read_groups(reader: ConfigReader, layers: int, scores: Scores) -> MLPShape:
    """Returns an MoE layer. With sigmoids there is a bias for the selection, and weights are normalised unless the file says otherwise."""
    count = reader.integer("n_routed_experts", high=MAX_EXPERTS)
    chosen = reader.integer("num_experts_per_tok", high=count)
    if count * layers > MOST_OF_ALL_LAYERS:
        raise LoadError(f"{reader.source}: {layers} layers of {count} experts; all layers together may have {MOST_OF_ALL_LAYERS}")
    inner, sigmoid = reader.integer("moe_intermediate_size", high=2**22), scores == "sigmoid"
    groups, chosen_groups = reader.integer("n_group", 1, high=count), reader.integer("topk_group", 1)
    if count % groups:
        raise reader.fail("n_group", f"a divisor of n_routed_experts {count}")
    if chosen_groups > groups or chosen_groups * (count // groups) < chosen:
        raise reader.fail("topk_group", f"at most n_group {groups}, with num_experts_per_tok {chosen} experts or more in so many groups")
    if sigmoid and chosen_groups < groups and count // groups < 2:
        raise reader.fail("n_group", f"at most {count // 2}: the score of a group is the sum of its best two experts")
    experts = Experts(
        count=count,
        chosen=chosen,
        scores=scores,
        normed=sigmoid and reader.flag("norm_topk_prob", True),
        shared_inner=inner * reader.integer("n_shared_experts", 0, high=1024, low=0),
        shared_gated=False,
        groups=groups,
        chosen_groups=chosen_groups,
        biased=sigmoid,
        scale=reader.number("routed_scaling_factor", 1.0, 1e-6, 1e6),
    )
    return MLPShape(inner, experts=experts)


def first_dense(reader: ConfigReader, fields: Mapping[str, Any], moe: MLPShape) -> list[MLPShape]:
    """Returns the MLP of each layer: the first ones are plain."""
    layers, dense = fields["num_layers"], reader.integer("first_k_dense_replace", 0, low=0)
    if dense >= layers:
        raise reader.fail("first_k_dense_replace", f"below num_hidden_layers {layers}: a model needs a layer with experts")
    return [MLPShape(fields["inner"])] * dense + [moe] * (layers - dense)


# -- description


def describe(rules: Rules, family: str, config: DenseConfig) -> ModelDescription:
    return dense_family.describe(rules, family, config, mixture_matrices, latent_parts)


def latent_parts(rules: Rules, config: DenseConfig, layer: int) -> MixerParts:
    spec, hidden = config.attention(layer), config.hidden_size
    latent, rank = _latent(config), spec.value_dim
    matrices = [rules.matrix("latent_in", "layers.*.attention.down", spec.projections, hidden, layer, split="rows")]
    norms = [vector("k_norm", "layers.*.attention.kv_norm", rank, layer)]
    if latent.q_rank is not None:
        matrices.append(rules.matrix("latent_q", "layers.*.attention.q_up", spec.projected_q, latent.q_rank, layer, split="rows"))
        norms.append(vector("q_norm", "layers.*.attention.q_norm", latent.q_rank, layer))
    k_up = rules.matrix("latent_k", "layers.*.attention.k_up", spec.num_heads * latent.plain_dim, rank, layer, split="rows")
    v_up = rules.matrix("latent_v", "layers.*.attention.v_up", spec.result_size, rank, layer, split="rows")
    return [
        *matrices,
        *(replace(one, heads=spec.num_heads) for one in (k_up, v_up)),
        rules.matrix("output", "layers.*.attention.output", hidden, spec.result_size, layer, split="columns"),
    ], [*norms, *_expert_bias(config, layer)]


def _expert_bias(config: DenseConfig, layer: int) -> list[Vector]:
    experts = config.layers[layer].mlp.experts
    if experts is None or not experts.biased:
        return []
    return [vector("expert_bias", "layers.*.mlp.expert_bias", experts.count, layer, wide=True)]


def _latent(config: DenseConfig) -> Latent:
    latent = config.attention().latent
    assert latent is not None, "a config of these families has latents"
    return latent


# -- the order of rows


def orders(config: DenseConfig) -> dict[str, RowOrder]:
    """For `Family.orders`: the rotated rows of each head of q, and of the latent's projection, are in interleaved order."""
    spec, latent = config.attention(), _latent(config)
    return {
        Q if latent.q_rank is None else Q_B: Interleaved(spec.num_heads, spec.rotary_dim, latent.plain_dim),
        KV_A: Interleaved(1, spec.rotary_dim, spec.value_dim),
    }


def k_and_v(config: DenseConfig) -> dict[str, RowOrder]:
    """For `Family.places`: the rows of k and of v alternate, head by head."""
    spec, latent = config.attention(), _latent(config)
    sizes = (latent.plain_dim, latent.value_dim)
    return {module: OfGroup(spec.num_heads, sizes, (part,)) for part, module in enumerate(K_AND_V.modules)}


# -- ranks: each has some heads, and the latents of all tokens


def shared(config: DenseConfig) -> dict[str, Shared]:
    return mixture_family.shared(config, "moe_intermediate_size", "n_shared_experts * moe_intermediate_size")


def divided(config: DenseConfig, own: Mapping[str, int], context: int) -> DenseConfig:
    """Like `dense_family.divided`."""
    if context > 1:
        raise ConfigError(
            f"decode_context_parallel_size is {context}, and the model has latent attention, for which ranks cannot share a context: "
            "set it to 1"
        )
    return dense_family.divided(config, own, context)


# -- GGUF files: all of these families are `deepseek2` there


GATING = {1: "softmax", 2: "sigmoid"}
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"  # a tenth of mscale_all_dim, which is taken to equal mscale


def gguf_config(keys: GGUFKeys, by_scores: Mapping[str, str]) -> dict[str, Any]:
    """Returns the keys of a config.json. `by_scores`: the architecture for each function of the router

    Newer files describe heads as they are around latents (`_mla`), and the cached key where others describe heads. Files without groups
    are computed without: nothing in them tells whether the model has some.
    """
    of_heads = "_mla" if keys.has("attention.key_length_mla") else ""
    heads, rotated = keys.integer("attention.head_count"), keys.integer("rope.dimension_count")
    key_length = keys.integer(f"attention.key_length{of_heads}")
    if key_length <= rotated:
        raise keys.fail(f"{keys.prefix}attention.key_length{of_heads}", f"above {keys.prefix}rope.dimension_count {rotated}")
    return _gguf_experts(keys, by_scores) | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": keys.integer("feed_forward_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _gguf_rope(keys),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0, low=0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": keys.integer(f"attention.value_length{of_heads}"),
    }


def _gguf_experts(keys: GGUFKeys, by_scores: Mapping[str, str]) -> dict[str, Any]:
    biased = any(name.endswith("exp_probs_b.bias") for name in keys.shapes)
    scores = GATING.get(keys.integer("expert_gating_func", 2 if biased else 1))
    if scores is None:
        raise keys.fail(f"{keys.prefix}expert_gating_func", " or ".join(f"{number} ({name})" for number, name in GATING.items()))
    groups = keys.integer("expert_group_count", 1)
    return {
        "architectures": [by_scores[scores]],
        "scoring_func": scores,
        "topk_method": "noaux_tc" if scores == "sigmoid" else "group_limited_greedy",
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0, low=0),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": keys.integer("expert_group_used_count", groups),
    }


def _gguf_rope(keys: GGUFKeys) -> dict[str, Any]:
    rope = keys.rope(also=[LOG_MULTIPLIER.rpartition(".")[2]])
    if rope["rope_type"] != "yarn":
        return rope
    if not keys.has(LOG_MULTIPLIER):
        return rope | {"attention_factor": 1.0}
    scale = keys.number(LOG_MULTIPLIER) * 10
    return rope | {"mscale": scale, "mscale_all_dim": scale}


def gguf_orders(architecture: str, config: Mapping[str, Any]) -> dict[str, RowOrder]:
    """For `GGUFForm`: like `orders`."""
    q = Interleaved(config["num_attention_heads"], config["qk_rope_head_dim"], config["qk_nope_head_dim"])
    kv = Interleaved(1, config["qk_rope_head_dim"], config["kv_lora_rank"])
    return {"attn_q" if config["q_lora_rank"] is None else "attn_q_b": q, "attn_kv_a_mqa": kv}


def gguf_turned(architecture: str, config: Mapping[str, Any]) -> dict[str, int]:
    """For `GGUFForm`: files that have k and v in tensors of their own have the first one transposed."""
    return {"attn_k_b": config["num_attention_heads"]}


def latent_family(name: str, architecture: str, read: Any, left_out: tuple[str, ...] = (), gguf: GGUFForm | None = None) -> Family:
    """Returns a family with one architecture. `left_out`: prefixes of weights of layers that predict further tokens"""
    rules = Rules(RULES, left_out=left_out, together=[K_AND_V])
    return Family(
        name=name,
        architectures=(architecture,),
        model=MODEL,
        rules=rules,
        read=read,
        describe=partial(describe, rules, name),
        gguf=gguf,
        shared=shared,
        divided=divided,
        cut=cut,
        deal=deal,
        orders=orders,
        places=k_and_v,
    )
