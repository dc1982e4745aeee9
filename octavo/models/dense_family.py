"""Llama, Qwen2 and Qwen3: one dense decoder. This is the one place that says what its layers are made of; no torch here.

    Llama   plain         Qwen2   biases on q, k, v         Qwen3   norms on the heads of q and k

    x -> norm -> q k v -> attention -> output -> + -> norm -> gate, up -> silu(gate) * up -> down -> +
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.attention.spec import AttentionSpec
from octavo.errors import LoadError
from octavo.model_config import NORM_EPSILONS, ConfigReader, ModelConfig, RopeConfig
from octavo.models.family import Family, GGUFForm, Rule, Rules, vector
from octavo.models.gguf_keys import GGUFKeys
from octavo.policy.description import LayerShape, Matrix, MLPShape, ModelDescription, NormShape, Vector
from octavo.policy.split import Shared

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"

RULES = Rules(
    [
        Rule("model.embed_tokens", "embed", gguf="token_embd"),
        Rule("model.layers.*.input_layernorm", "layers.*.attention_norm", gguf="blk.*.attn_norm"),
        Rule("model.layers.*.self_attn.q_proj", "layers.*.attention.qkv", "q", gguf="blk.*.attn_q"),
        Rule("model.layers.*.self_attn.k_proj", "layers.*.attention.qkv", "k", gguf="blk.*.attn_k"),
        Rule("model.layers.*.self_attn.v_proj", "layers.*.attention.qkv", "v", gguf="blk.*.attn_v"),
        Rule("model.layers.*.self_attn.q_norm", "layers.*.attention.q_norm", gguf="blk.*.attn_q_norm"),
        Rule("model.layers.*.self_attn.k_norm", "layers.*.attention.k_norm", gguf="blk.*.attn_k_norm"),
        Rule("model.layers.*.self_attn.o_proj", "layers.*.attention.output", gguf="blk.*.attn_output"),
        Rule("model.layers.*.post_attention_layernorm", "layers.*.mlp_norm", gguf="blk.*.ffn_norm"),
        Rule("model.layers.*.mlp.gate_proj", "layers.*.mlp.gate_up", "gate", gguf="blk.*.ffn_gate"),
        Rule("model.layers.*.mlp.up_proj", "layers.*.mlp.gate_up", "up", gguf="blk.*.ffn_up"),
        Rule("model.layers.*.mlp.down_proj", "layers.*.mlp.down", gguf="blk.*.ffn_down"),
        Rule("model.norm", "norm", gguf="output_norm"),
        Rule("lm_head", "head", gguf="output"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(ModelConfig):
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool  # bias of the attention output projection
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # of each layer: sliding window in tokens; None: full attention

    def attention(self, layer: int) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.windows[layer],
            rope=self.rope,
            qk_norm=self.qk_norm,
            context_ranks=self.context_ranks,
        )


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
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
    if reader.raw.get("hidden_act", "silu") != "silu":
        raise reader.fail("hidden_act", "silu")
    bias = reader.flag("attention_bias", False)
    return DenseConfig(
        **common,
        intermediate_size=reader.integer("intermediate_size", high=2**22),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", 1e-6, *NORM_EPSILONS),
        rope=reader.rope(),
        qkv_bias=bias or architecture == QWEN2,
        output_bias=bias and architecture != QWEN2,
        mlp_bias=reader.flag("mlp_bias", False),
        qk_norm=architecture == QWEN3,
        windows=_windows(reader, common["num_layers"]),
    )


def _windows(reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window. In Qwen2 and Qwen3 `layer_types` says which layers have one, in older files `max_window_layers`."""
    if not reader.flag("use_sliding_window", False) or reader.raw.get("sliding_window") is None:
        return (None,) * layers
    window = reader.integer("sliding_window")
    types = reader.raw.get("layer_types")
    if types is None:
        first = reader.integer("max_window_layers", 28, low=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
        raise reader.fail("layer_types", f"{layers} of full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def describe(config: DenseConfig) -> ModelDescription:
    norm, mlp, numbers = NormShape(config.norm_eps), MLPShape(config.intermediate_size), range(config.num_layers)
    tied, vocabulary = config.tie_embeddings, (config.vocab_size, config.hidden_size)
    embedding = RULES.matrix("embedding", "embed", *vocabulary, split="rows", vocabulary=True)
    head = RULES.matrix("head", "embed" if tied else "head", *vocabulary, split="rows", vocabulary=True)
    return ModelDescription(
        family="dense",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position=config.max_position,
        norm=norm,
        layers=tuple(LayerShape(config.attention(layer), mlp, norm) for layer in numbers),
        matrices=(*(matrix for layer in numbers for matrix in _layer_matrices(config, layer)), head),
        vectors=(*(one for layer in numbers for one in _layer_vectors(config, layer)), vector("norm", "norm", config.hidden_size)),
        lookup=None if tied else embedding,
        captured=True,
    )


def _layer_matrices(config: DenseConfig, layer: int) -> list[Matrix]:
    hidden, inner, spec = config.hidden_size, config.intermediate_size, config.attention(layer)
    return [
        RULES.matrix("qkv", "layers.*.attention.qkv", spec.projections, hidden, layer, config.qkv_bias, split="rows"),
        RULES.matrix("output", "layers.*.attention.output", hidden, spec.q_size, layer, config.output_bias, split="columns"),
        RULES.matrix("gate_up", "layers.*.mlp.gate_up", {"gate": inner, "up": inner}, hidden, layer, config.mlp_bias, "rows", gated=True),
        RULES.matrix("down", "layers.*.mlp.down", hidden, inner, layer, config.mlp_bias, split="columns"),
    ]


def _layer_vectors(config: DenseConfig, layer: int) -> list[Vector]:
    sizes = {"attention_norm": config.hidden_size, "mlp_norm": config.hidden_size}
    heads = {"q_norm": config.head_dim, "k_norm": config.head_dim} if config.qk_norm else {}
    return [
        *(vector(name, f"layers.*.{name}", size, layer) for name, size in sizes.items()),
        *(vector(name, f"layers.*.attention.{name}", size, layer) for name, size in heads.items()),
    ]


def shared(config: DenseConfig) -> dict[str, Shared]:
    return {
        "num_heads": Shared("num_attention_heads", config.num_heads),
        "num_kv_heads": Shared("num_key_value_heads", config.num_kv_heads, repeats=True),
        "intermediate_size": Shared("intermediate_size", config.intermediate_size),
    }


def cut(config: DenseConfig, layers: range) -> DenseConfig:
    return replace(config, num_layers=len(layers), windows=config.windows[layers.start : layers.stop])


def _gguf_config(keys: GGUFKeys) -> dict[str, Any]:
    """Returns the family's keys of a config.json. Experts, partly rotated heads and windows are refused, not ignored."""
    if keys.integer("expert_count", 0, low=0):
        raise keys.fail(f"{keys.prefix}expert_count", "0 (a dense model)")
    context = keys.integer("context_length")
    if 0 < keys.integer("attention.sliding_window", 0, low=0) < context:
        raise keys.fail(f"{keys.prefix}attention.sliding_window", f"absent or at least the context length {context}")
    heads = keys.integer("attention.head_count")
    config = {
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": keys.rope(),
        "attention_bias": "blk.0.attn_q.bias" in keys.shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in keys.shapes,
    }
    return config if (head_dim := keys.head_dim()) is None else {**config, "head_dim": head_dim}


def _interleaved(architecture: str, config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the heads of tensors in interleaved rotary order: q and k in files of Llama models."""
    return {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if architecture == "llama" else {}


FAMILY = Family(
    name="dense",
    architectures=(LLAMA, QWEN2, QWEN3),
    model="octavo.models.dense:DenseModel",
    rules=RULES,
    read=read,
    describe=describe,
    gguf=GGUFForm({"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}, _gguf_config, _interleaved),
    shared=shared,
    cut=cut,
)
