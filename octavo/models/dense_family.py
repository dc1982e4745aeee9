"""The parts of every dense decoder: its config, its description, and fields common to families. It names no family and uses no torch.

    x -> norm -> q k v -> attention -> output -> + -> norm -> gate, up -> silu(gate) * up -> down -> +

Each family's module defines its differences: the position of norms, which layers have a window or no rotation, what is scaled
or capped. `models/dense.py` computes a model from the config.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

from octavo.attention.spec import AttentionSpec
from octavo.errors import LoadError
from octavo.model_config import NORM_EPSILONS, ConfigReader, ModelConfig
from octavo.models.description import LayerShape, Matrix, MLPShape, ModelDescription, NormShape, Vector
from octavo.models.family import Family, GGUFForm, Rule, Rules, vector
from octavo.models.gguf_keys import GGUFKeys
from octavo.models.row_order import Interleaved, RowOrder
from octavo.models.split import Shared

MODEL = "octavo.models.dense:DenseModel"
MixerParts = tuple[list[Matrix], list[Vector]]  # of one layer
SLIDING, FULL = "sliding_attention", "full_attention"

EMBEDDING_RULES = (
    Rule("model.embed_tokens", "embed", gguf="token_embd"),
    Rule("model.norm", "norm", gguf="output_norm"),
    Rule("lm_head", "head", gguf="output"),
)
ATTENTION_RULES = (
    Rule("model.layers.*.self_attn.q_proj", "layers.*.attention.qkv", "q", gguf="blk.*.attn_q"),
    Rule("model.layers.*.self_attn.k_proj", "layers.*.attention.qkv", "k", gguf="blk.*.attn_k"),
    Rule("model.layers.*.self_attn.v_proj", "layers.*.attention.qkv", "v", gguf="blk.*.attn_v"),
    Rule("model.layers.*.self_attn.o_proj", "layers.*.attention.output", gguf="blk.*.attn_output"),
)
QK_NORM_RULES = (
    Rule("model.layers.*.self_attn.q_norm", "layers.*.attention.q_norm", gguf="blk.*.attn_q_norm"),
    Rule("model.layers.*.self_attn.k_norm", "layers.*.attention.k_norm", gguf="blk.*.attn_k_norm"),
)
NORM_RULES = (
    Rule("model.layers.*.input_layernorm", "layers.*.attention_norm", gguf="blk.*.attn_norm"),
    Rule("model.layers.*.post_attention_layernorm", "layers.*.mlp_norm", gguf="blk.*.ffn_norm"),
)
MLP_RULES = (
    Rule("model.layers.*.mlp.gate_proj", "layers.*.mlp.gate_up", "gate", gguf="blk.*.ffn_gate"),
    Rule("model.layers.*.mlp.up_proj", "layers.*.mlp.gate_up", "up", gguf="blk.*.ffn_up"),
    Rule("model.layers.*.mlp.down_proj", "layers.*.mlp.down", gguf="blk.*.ffn_down"),
)
PLAIN_RULES = Rules([*EMBEDDING_RULES, *NORM_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES])


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(ModelConfig):
    layers: tuple[LayerShape, ...]
    norm: NormShape  # of the layers, of the last hidden states, and of the embedding if that is normed
    qkv_bias: bool
    output_bias: bool  # bias of the attention output projection
    mlp_bias: bool
    wide_norms: bool = False  # norm weights are float32, and are applied before rounding
    normed_embedding: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    def attention(self, layer: int | None = None) -> AttentionSpec:
        """`layer`: the first that has attention by default. All layers with attention have the same heads."""
        if layer is None:
            return next(shape.mixer for shape in self.layers if isinstance(shape.mixer, AttentionSpec))
        return cast(AttentionSpec, self.layers[layer].mixer)


def dense_config(given: Mapping[str, Any]) -> DenseConfig:
    """Builds a config from values by name: fields of the config itself, and of every layer, its attention and its MLP.

    Values that differ by layer are lists: `windows`, `ropes` and `mlps` (`MLPShape`), if given.
    """
    rest, count = {"scale": given["head_dim"] ** -0.5, **given}, given["num_layers"]
    windows = rest.pop("windows", [None] * count)
    ropes = rest.pop("ropes", [rest.pop("rope", None)] * count)
    attention, mlp, layer, own = (_fields_of(kind, rest) for kind in (AttentionSpec, MLPShape, LayerShape, DenseConfig))
    mlps = rest.pop("mlps", [MLPShape(**mlp)] * count)
    assert not (unknown := rest.keys() - attention.keys() - mlp.keys() - layer.keys() - own.keys()), f"no part has {unknown}"
    mixers = [AttentionSpec(**attention, window=window, rope=rope) for window, rope in zip(windows, ropes, strict=True)]
    return DenseConfig(**own, layers=tuple(LayerShape(*parts, **layer) for parts in zip(mixers, mlps, strict=True)))


def _fields_of(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


# -- reading a config.json


def read_fields(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """Reads the values of a plain decoder for `dense_config`, by the keys that most families share. A family replaces those that differ."""
    heads = reader.integer("num_attention_heads", high=65536)
    kv_heads = reader.integer("num_key_value_heads", heads, high=65536)
    common = reader.common(architecture)
    hidden = common["hidden_size"]
    if heads % kv_heads:
        raise LoadError(f"{reader.source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if reader.raw.get("head_dim") is None and hidden % heads:
        raise LoadError(f"{reader.source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = reader.integer("head_dim", hidden // heads, high=4096)
    if head_dim % 2:
        raise reader.fail("head_dim", "even, for rotary positions")
    bias = reader.flag("attention_bias", False)
    return {
        **common,
        "inner": reader.integer("intermediate_size", high=2**22),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm": NormShape(reader.number("rms_norm_eps", 1e-6, *NORM_EPSILONS)),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": reader.flag("mlp_bias", False),
    }


def with_defaults(reader: ConfigReader, defaults: Mapping[str, Any]) -> ConfigReader:
    """Returns a reader with a family's default values for keys that a file may omit."""
    return ConfigReader({**defaults, **reader.raw}, reader.source)


def check_activation(reader: ConfigReader, name: str = "silu", key: str = "hidden_act") -> None:
    if reader.raw.get(key, name) != name:
        raise reader.fail(key, name)


def read_window(reader: ConfigReader) -> int | None:
    """Returns `sliding_window`, or None if there is none or if no sequence can exceed it."""
    if reader.raw.get("sliding_window") is None:
        return None
    window = reader.integer("sliding_window")
    return window if window < reader.integer("max_position_embeddings", 2048) else None


def read_layer_types(reader: ConfigReader, layers: int, slides: Callable[[int], bool]) -> list[str]:
    """Returns the kind of each layer. `slides` tells which have a window, for files without `layer_types`."""
    types = reader.raw.get("layer_types")
    if types is None:
        types = [SLIDING if slides(layer) else FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(kind in (SLIDING, FULL) for kind in types):
        raise reader.fail("layer_types", f"{layers} of {FULL} or {SLIDING}")
    return types


def read_rotated(reader: ConfigReader, parameters: Mapping[str, Any], head_dim: int) -> int:
    """Returns how many dimensions of a head are rotated: `partial_rotary_factor` of them."""
    key = "partial_rotary_factor"
    inner = ConfigReader({key: parameters.get(key, reader.raw.get(key))}, reader.source)
    rotated = int(head_dim * inner.number(key, 1.0, 0.0, 1.0) + 1e-6)  # the factor may be a quotient that was rounded down
    if rotated < 2 or rotated % 2:
        raise inner.fail(key, f"a part of head_dim {head_dim} that is an even number above 0")
    return rotated


def layer_windows(reader: ConfigReader, types: list[str]) -> tuple[int | None, ...]:
    window = read_window(reader)
    return tuple(window if kind == SLIDING else None for kind in types)


# -- description


def mlp_matrices(rules: Rules, config: DenseConfig, layer: int) -> list[Matrix]:
    hidden, mlp, bias = config.hidden_size, config.layers[layer].mlp, config.mlp_bias
    inner = mlp.inner
    parts = {"gate": inner, "up": inner} if mlp.gated else {"up": inner}
    return [
        rules.matrix("gate_up", "layers.*.mlp.gate_up", parts, hidden, layer, bias, "rows", gated=mlp.gated),
        rules.matrix("down", "layers.*.mlp.down", hidden, inner, layer, bias, split="columns"),
    ]


def describe(
    rules: Rules, family: str, config: DenseConfig, mlp: Callable[[Rules, Any, int], list[Matrix]] = mlp_matrices,
    mixer: Callable[[Rules, Any, int], MixerParts] | None = None,
) -> ModelDescription:  # fmt: skip
    """`mlp`: returns the matrices of a layer's MLP, for families in which it is not always a plain one; `mixer`: the same for its mixer"""
    mixers = [(mixer or attention_parts)(rules, config, layer) for layer in range(config.num_layers)]
    numbers, tied, vocabulary = range(config.num_layers), config.tie_embeddings, (config.vocab_size, config.hidden_size)
    embedding = rules.matrix("embedding", "embed", *vocabulary, split="rows", vocabulary=True)
    head = rules.matrix("head", "embed" if tied else "head", *vocabulary, split="rows", vocabulary=True)
    norm = partial(vector, size=config.hidden_size, bias=config.norm.bias, wide=config.wide_norms)
    first = [norm("embedding_norm", "embedding_norm")] if config.normed_embedding else []
    return ModelDescription(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position=config.max_position,
        norm=config.norm,
        layers=config.layers,
        matrices=(*(one for layer in numbers for one in [*mixers[layer][0], *mlp(rules, config, layer)]), head),
        vectors=(*first, *(one for layer in numbers for one in [*layer_norms(config, layer), *mixers[layer][1]]), norm("norm", "norm")),
        lookup=None if tied else embedding,
        embedding_scale=config.embedding_scale,
        logit_scale=config.logit_scale,
        logit_cap=config.logit_cap,
        captured=True,
    )


def attention_parts(rules: Rules, config: DenseConfig, layer: int) -> MixerParts:
    hidden, spec = config.hidden_size, config.attention(layer)
    matrices = [
        rules.matrix("qkv", "layers.*.attention.qkv", spec.projections, hidden, layer, config.qkv_bias, split="rows"),
        rules.matrix("output", "layers.*.attention.output", hidden, spec.q_size, layer, config.output_bias, split="columns"),
    ]
    heads = {} if spec.qk_norm is None else dict(zip(("q_norm", "k_norm"), spec.normed))
    norms = [vector(name, f"layers.*.attention.{name}", size, layer, wide=config.wide_norms) for name, size in heads.items()]
    return matrices, [*norms, *([vector("sinks", "layers.*.attention.sinks", spec.num_heads, layer)] if spec.sinks else [])]


def layer_norms(config: DenseConfig, layer: int) -> list[Vector]:
    """Returns the norms before and after the sub-layers."""
    shape = config.layers[layer]
    before, after = ["attention_norm", "mlp_norm"], ["attention_after_norm", "mlp_after_norm"]
    names = {"before": before[:1] if shape.parallel else before, "after": after, "both": before + after}[shape.norms]
    return [vector(name, f"layers.*.{name}", config.hidden_size, layer, config.norm.bias, config.wide_norms) for name in names]


def shared(config: DenseConfig) -> dict[str, Shared]:
    spec = config.attention()
    return {
        "num_heads": Shared("num_attention_heads", spec.num_heads),
        "num_kv_heads": Shared("num_key_value_heads", spec.num_kv_heads, repeats=True),
        "inner": Shared("intermediate_size", config.layers[0].mlp.inner),
    }


def divided(config: DenseConfig, own: Mapping[str, int], context: int) -> DenseConfig:
    """Returns the config of a rank. `own`: its numbers, by the names of `shared`"""

    def of_rank(layer: LayerShape, spec: AttentionSpec) -> LayerShape:
        return replace(layer, mixer=divided_attention(spec, own, context), mlp=divided_mlp(layer.mlp, own))

    return replace(config, layers=tuple(of_rank(layer, config.attention(index)) for index, layer in enumerate(config.layers)))


def divided_attention(spec: AttentionSpec, own: Mapping[str, int], context: int) -> AttentionSpec:
    return replace(spec, num_heads=own["num_heads"], num_kv_heads=own["num_kv_heads"], context_ranks=context)


def divided_mlp(mlp: MLPShape, own: Mapping[str, int]) -> MLPShape:
    if mlp.experts is None:
        return replace(mlp, inner=own["inner"])
    experts = replace(mlp.experts, shared_inner=own.get("shared_inner", 0))
    return replace(mlp, inner=own.get("expert_inner", mlp.inner), experts=experts)


def cut(config: DenseConfig, layers: range) -> DenseConfig:
    return replace(config, num_layers=len(layers), layers=config.layers[layers.start : layers.stop])


# -- GGUF files


def gguf_fields(
    keys: GGUFKeys, windowed: bool = False, head_dim: bool = True, experts: bool = False, layer_norms: bool = False
) -> dict[str, Any]:
    """Returns the keys of a config.json that most families share.

    `windowed`, `experts`: the family reads them itself, otherwise they are refused; `head_dim`: whole heads are rotated, which tells their
    width; `layer_norms`: norms are layer norms
    """
    epsilon = ("layer_norm_eps", "layer_norm_epsilon") if layer_norms else ("rms_norm_eps", "layer_norm_rms_epsilon")
    if not experts and keys.integer("expert_count", 0, low=0):
        raise keys.fail(f"{keys.prefix}expert_count", "0 (a dense model)")
    context = keys.integer("context_length")
    if not windowed and 0 < keys.integer("attention.sliding_window", 0, low=0) < context:
        raise keys.fail(f"{keys.prefix}attention.sliding_window", f"absent or at least the context length {context}")
    heads = keys.integer("attention.head_count")
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        epsilon[0]: keys.number(f"attention.{epsilon[1]}"),
        "rope_parameters": keys.rope(),
        "attention_bias": "blk.0.attn_q.bias" in keys.shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in keys.shapes,
    }
    if not experts or keys.has("feed_forward_length"):
        config["intermediate_size"] = keys.integer("feed_forward_length")
    width = keys.head_dim() if head_dim else None
    return config if width is None else {**config, "head_dim": width}


def gguf_rotated(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config.json for heads of which a part is rotated."""
    head_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // config["num_attention_heads"])
    return {"head_dim": head_dim, "partial_rotary_factor": keys.integer("rope.dimension_count", head_dim) / head_dim}


def interleaved_rows(config: DenseConfig) -> dict[str, RowOrder]:
    """For `Family.orders`: q and k are in interleaved rotary order."""
    (q, k), spec = (rule.checkpoint for rule in ATTENTION_RULES[:2]), config.attention()
    return {q: Interleaved(spec.num_heads, spec.rotary_dim), k: Interleaved(spec.num_kv_heads, spec.rotary_dim)}


def interleaved_qk(architectures: Sequence[str]) -> Callable[[str, Mapping[str, Any]], Mapping[str, RowOrder]]:
    """Returns the function for `GGUFForm`: in files of these architectures q and k are in interleaved rotary order."""

    def orders(architecture: str, config: Mapping[str, Any]) -> Mapping[str, RowOrder]:
        if architecture not in architectures:
            return {}
        factor = config.get("partial_rotary_factor")
        rotated = None if factor is None else round(config["head_dim"] * factor)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        return {word: Interleaved(count, rotated) for word, count in heads.items()}

    return orders


def dense_family(
    name: str,
    architectures: tuple[str, ...],
    read: Callable[[ConfigReader, str], DenseConfig],
    gguf: GGUFForm,
    rules: Rules = PLAIN_RULES,
    unshared: str | None = None,
    orders: Callable[[DenseConfig], Mapping[str, RowOrder]] | None = None,
) -> Family:
    """Returns a family of decoders without experts. `unshared`: why its matrices cannot be split among ranks, if so"""
    family = Family(name, architectures, MODEL, rules, read, partial(describe, rules, name), gguf, shared, divided, cut=cut, orders=orders)
    return family if unshared is None else replace(family, shared=None, unshared=unshared)
