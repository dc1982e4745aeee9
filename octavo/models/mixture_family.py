"""Mixtral, Qwen2-MoE and Qwen3-MoE: decoders with MoE layers. It uses no torch.

    Mixtral     8 experts, of which a token uses 2         Qwen2-MoE   biases on q, k, v; one more expert that all tokens share
    Qwen3-MoE   norms on the heads of q and k              both Qwen   some layers may have a plain MLP instead

    x -> norm -> router -> the best experts, each: gate, up -> silu(gate) * up -> down -> weighted sum -> +

The rest is as in `models/dense_family.py`. `models/gpt_oss_family.py` is another such family, and uses this module.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from octavo.errors import ConfigError, LoadError
from octavo.model_config import ConfigReader
from octavo.models import dense_family
from octavo.models.dense_family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    MLP_RULES,
    MODEL,
    NORM_RULES,
    QK_NORM_RULES,
    DenseConfig,
    check_activation,
    cut,
    dense_config,
    divided,
    gguf_fields,
    interleaved_qk,
    layer_windows,
    mlp_matrices,
    read_fields,
    read_layer_types,
    read_window,
)
from octavo.models.description import EXPERT_STACKS, Experts, Matrix, MLPShape, ModelDescription
from octavo.models.family import MAX_EXPERTS, Family, GGUFForm, Rule, Rules
from octavo.models.gguf_keys import GGUFKeys
from octavo.models.split import Shared

MOST_OF_ALL_LAYERS = 2**17  # experts: several times as many as any model has, and a bound on names
MATRICES = {  # all names of matrices in the descriptions of dense decoders, with experts or without
    "qkv", "output", "gate_up", "down", "head", "router", *EXPERT_STACKS, "shared_gate_up", "shared_down", "shared_gate",
    "latent_in", "latent_q", "latent_k", "latent_v",
}  # fmt: skip
MIXTRAL, QWEN2_MOE, QWEN3_MOE = "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"


def expert_rules(router: str, experts: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Returns the rules for the router and the experts. The names of matrices are relative to an expert."""
    return (
        Rule(router, "layers.*.mlp.router", gguf="blk.*.ffn_gate_inp"),
        Rule(f"{experts}.*.{gate}", "layers.*.mlp.experts.gate_up", "*.gate", gguf="blk.*.ffn_gate_exps"),
        Rule(f"{experts}.*.{up}", "layers.*.mlp.experts.gate_up", "*.up", gguf="blk.*.ffn_up_exps"),
        Rule(f"{experts}.*.{down}", "layers.*.mlp.experts.down", "*", gguf="blk.*.ffn_down_exps"),
    )


SPARSE = "model.layers.*.block_sparse_moe"
MIXTRAL_RULES = Rules(
    [*EMBEDDING_RULES, *NORM_RULES, *ATTENTION_RULES, *expert_rules(f"{SPARSE}.gate", f"{SPARSE}.experts", "w1", "w3", "w2")]
)
MLP = "model.layers.*.mlp"
QWEN_MLP_RULES = (
    *MLP_RULES,
    *expert_rules(f"{MLP}.gate", f"{MLP}.experts", "gate_proj", "up_proj", "down_proj"),
    Rule(f"{MLP}.shared_expert.gate_proj", "layers.*.mlp.shared.gate_up", "gate", gguf="blk.*.ffn_gate_shexp"),
    Rule(f"{MLP}.shared_expert.up_proj", "layers.*.mlp.shared.gate_up", "up", gguf="blk.*.ffn_up_shexp"),
    Rule(f"{MLP}.shared_expert.down_proj", "layers.*.mlp.shared.down", gguf="blk.*.ffn_down_shexp"),
    Rule(f"{MLP}.shared_expert_gate", "layers.*.mlp.shared_gate", gguf="blk.*.ffn_gate_inp_shexp"),
)
QWEN_RULES = Rules([*EMBEDDING_RULES, *NORM_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *QWEN_MLP_RULES])


# -- reading a config.json


def read_experts(reader: ConfigReader, num_layers: int, size_key: str) -> tuple[int, Experts]:
    """Returns the width of an expert, whose key is `size_key`, and what all MoE models say of them."""
    key = "num_local_experts" if reader.raw.get("num_experts") is None else "num_experts"
    count = reader.integer(key, high=MAX_EXPERTS)
    if count * num_layers > MOST_OF_ALL_LAYERS:
        raise LoadError(f"{reader.source}: {num_layers} layers of {count} experts; all layers together may have {MOST_OF_ALL_LAYERS}")
    return reader.integer(size_key, high=2**22), Experts(count, chosen=reader.integer("num_experts_per_tok", high=count))


def read_mixtral(reader: ConfigReader, architecture: str) -> DenseConfig:
    check_activation(reader)
    fields = read_fields(reader, architecture)
    layers = fields["num_layers"]
    inner, experts = read_experts(reader, layers, "intermediate_size")
    fields |= {"mlps": [MLPShape(inner, experts=experts)] * layers, "windows": [read_window(reader)] * layers}
    return dense_config(fields | {"rope": reader.rope(fields["head_dim"])})


def read_qwen(reader: ConfigReader, architecture: str) -> DenseConfig:
    check_activation(reader)
    fields = read_fields(reader, architecture)
    layers, shared_inner, slides = fields["num_layers"], 0, reader.flag("use_sliding_window", False)
    if architecture == QWEN2_MOE:
        shared_inner = reader.integer("shared_expert_intermediate_size", high=2**22, low=0)
        fields |= {"qkv_bias": reader.flag("qkv_bias", True), "output_bias": False}
        end = reader.integer("max_window_layers", 28, low=0)  # for files without `layer_types`
        types = read_layer_types(reader, layers, lambda layer: layer % 2 == 0 and layer < end)
        fields |= {"windows": layer_windows(reader, types)} if slides else {}
    else:
        fields |= {"qk_norm": "heads", "windows": [read_window(reader) if slides else None] * layers}
    inner, experts = read_experts(reader, layers, "moe_intermediate_size")
    experts = replace(experts, normed=reader.flag("norm_topk_prob", False), shared_inner=shared_inner)
    moe, plain = MLPShape(inner, experts=experts), MLPShape(fields["inner"])
    fields |= {"mlps": [moe if there else plain for there in layers_with_experts(reader, layers)]}
    return dense_config(fields | {"rope": reader.rope(fields["head_dim"])})


def with_shared_expert(reader: ConfigReader, experts: Experts) -> Experts:
    """Returns experts whose weights are normalised, unless the file says otherwise, beside one that all tokens share."""
    shared_inner = reader.integer("shared_expert_intermediate_size", high=2**22, low=0)
    return replace(experts, normed=reader.flag("norm_topk_prob", True), shared_inner=shared_inner)


def layers_with_experts(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Returns which layers are MoE layers: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step, plain = reader.integer("decoder_sparse_step", 1), reader.raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise reader.fail("mlp_only_layers", "a list of layers")
    mixed = tuple((layer + 1) % step == 0 and layer not in plain for layer in range(layers))
    if not any(mixed):
        raise LoadError(f"{reader.source}: decoder_sparse_step and mlp_only_layers leave no layer with experts")
    return mixed


# -- description


def describe(rules: Rules, family: str, config: DenseConfig) -> ModelDescription:
    return dense_family.describe(rules, family, config, mixture_matrices)


def mixture_matrices(rules: Rules, config: DenseConfig, layer: int) -> list[Matrix]:
    """Returns the matrices of a layer's MLP. A stack of experts is one matrix, with the parts of all experts in sequence."""
    shape, hidden, bias = config.layers[layer].mlp, config.hidden_size, config.mlp_bias
    if (experts := shape.experts) is None:
        return mlp_matrices(rules, config, layer)
    inner, dealt = shape.inner, experts.ranks > 1
    halves = {f"{expert}.{part}": inner for expert in range(experts.held) for part in ("gate", "up")}
    downs = {str(expert): hidden for expert in range(experts.held)}
    found = [
        rules.matrix("router", "layers.*.mlp.router", experts.count, hidden, layer, bias),
        rules.matrix("experts_gate_up", "layers.*.mlp.experts.gate_up", halves, hidden, layer, bias, None if dealt else "rows", gated=True),
        rules.matrix("experts_down", "layers.*.mlp.experts.down", downs, inner, layer, bias, None if dealt else "columns"),
    ]
    if (shared_inner := experts.shared_inner) == 0:
        return found
    shared_halves = {"gate": shared_inner, "up": shared_inner}
    return [
        *found,
        rules.matrix("shared_gate_up", "layers.*.mlp.shared.gate_up", shared_halves, hidden, layer, split="rows", gated=True),
        rules.matrix("shared_down", "layers.*.mlp.shared.down", hidden, shared_inner, layer, split="columns"),
        *([rules.matrix("shared_gate", "layers.*.mlp.shared_gate", 1, hidden, layer)] if experts.shared_gated else []),
    ]


# -- ranks and stages


def shared(
    config: DenseConfig, size_key: str = "intermediate_size", shared_key: str = "shared_expert_intermediate_size"
) -> dict[str, Shared]:
    """Every expert is split, unless ranks have whole ones. `size_key`, `shared_key`: of the width of an expert, and of the shared one"""
    mlps = [layer.mlp for layer in config.layers]
    plain = next((mlp for mlp in mlps if mlp.experts is None), None)
    inner, experts = next((mlp.inner, mlp.experts) for mlp in mlps if mlp.experts is not None)
    found = dense_family.shared(config)
    del found["inner"]
    if plain is not None:
        found["inner"] = Shared("intermediate_size", plain.inner)
    if experts.ranks == 1:
        found["expert_inner"] = Shared(size_key, inner)
    if experts.shared_inner:
        found["shared_inner"] = Shared(shared_key, experts.shared_inner)
    return found


def deal(config: DenseConfig, ranks: int) -> DenseConfig:
    return replace(config, layers=tuple(replace(layer, mlp=_dealt(layer.mlp, ranks)) for layer in config.layers))


def _dealt(mlp: MLPShape, ranks: int) -> MLPShape:
    if mlp.experts is None:
        return mlp
    if (count := mlp.experts.count) % ranks:
        sizes = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        raise ConfigError(f"{count} experts cannot be divided among tensor_parallel_size {ranks}: sizes that can: {sizes}")
    return replace(mlp, experts=replace(mlp.experts, ranks=ranks))


# -- GGUF files


def gguf_experts(keys: GGUFKeys) -> dict[str, Any]:
    """Returns the keys of a config.json that all MoE models share. Sizes come from the tensors, because older files do not have them."""
    count, layers = keys.integer("expert_count"), keys.num_layers()
    stacks = [layer for layer in range(layers) if len(keys.shapes.get(f"blk.{layer}.ffn_gate_exps.weight", ())) == 3]
    if not stacks:
        raise keys.fail(f"{keys.prefix}expert_count", "0 in a file without blk.*.ffn_gate_exps.weight, the stack of experts")
    size = keys.shapes[f"blk.{stacks[0]}.ffn_gate_exps.weight"][1]
    return {
        "num_local_experts": count,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": size,
        "mlp_only_layers": [layer for layer in range(layers) if layer not in stacks],
    }


def _mixtral_gguf(keys: GGUFKeys) -> dict[str, Any]:
    experts = gguf_experts(keys)
    return {**gguf_fields(keys, experts=True), **experts, "intermediate_size": experts["moe_intermediate_size"]}


def _qwen_gguf(keys: GGUFKeys) -> dict[str, Any]:
    """Files do not contain whether weights are normalised: those of Qwen2-MoE models never are, those of Qwen3-MoE always."""
    fields = {**gguf_fields(keys, experts=True), **gguf_experts(keys), "norm_topk_prob": keys.prefix == "qwen3moe."}
    shared_gate = keys.shapes.get("blk.0.ffn_gate_shexp.weight", (0,))
    return {**fields, "shared_expert_intermediate_size": shared_gate[0], "qkv_bias": fields["attention_bias"]}


MIXTRAL_FAMILY = Family(
    name="mixtral",
    architectures=(MIXTRAL,),
    model=MODEL,
    rules=MIXTRAL_RULES,
    read=read_mixtral,
    describe=partial(describe, MIXTRAL_RULES, "mixtral"),
    gguf=GGUFForm({"llama": MIXTRAL}, _mixtral_gguf, interleaved_qk(["llama"]), experts=True),
    shared=shared,
    divided=divided,
    cut=cut,
    deal=deal,
)
QWEN_FAMILY = Family(
    name="qwen_moe",
    architectures=(QWEN2_MOE, QWEN3_MOE),
    model=MODEL,
    rules=QWEN_RULES,
    read=read_qwen,
    describe=partial(describe, QWEN_RULES, "qwen_moe"),
    gguf=GGUFForm({"qwen2moe": QWEN2_MOE, "qwen3moe": QWEN3_MOE}, _qwen_gguf, interleaved_qk([]), experts=True),
    shared=partial(shared, size_key="moe_intermediate_size"),
    divided=divided,
    cut=cut,
    deal=deal,
)
