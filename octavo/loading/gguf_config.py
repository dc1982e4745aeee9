"""GGUF metadata in the words of a config.json, so that `ModelConfig` reads both kinds of model the same way.

Each value taken here is checked under its GGUF key, for the message to name what the file really says. What a dense
Llama, Qwen2 or Qwen3 cannot express (experts, part-rotary heads, windows, other RoPE scalings) is refused, not ignored.
"""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from octavo.errors import LoadError
from octavo.loading.gguf import GGUFTensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ROPE_SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")


class _Keys:
    """Checked values out of the metadata, under the architecture's prefix (`llama.block_count`)."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, source: str) -> None:
        self.metadata = metadata
        self.prefix = architecture + "."
        self.source = source

    def fail(self, key: str, wanted: str) -> LoadError:
        shown = reprlib.repr(self.metadata.get(key, "(missing)"))
        return LoadError(f"{self.source}: {key} must be {wanted}, got {shown}")

    def has(self, name: str) -> bool:
        return self.prefix + name in self.metadata

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        key = self.prefix + name
        value = self.metadata.get(key, default)
        if type(value) is not int or not low <= value < 2**31:
            raise self.fail(key, f"an integer from {low} to {2**31 - 1}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        key = self.prefix + name
        value = self.metadata.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, "a finite number above 0")
        return float(value)

    def token_id(self, key: str, vocab_size: int) -> int:
        value = self.metadata[key]
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.fail(key, f"a token id below the vocabulary size {vocab_size}")
        return value


def gguf_architecture(metadata: Mapping[str, Any], source: str) -> str:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise LoadError(f"{source}: general.architecture is {reprlib.repr(name)}; supported: {', '.join(ARCHITECTURES)}")
    return name


def config_dict(metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], source: str) -> dict[str, Any]:
    """What config.json would say of this model."""
    architecture = gguf_architecture(metadata, source)
    keys = _Keys(metadata, architecture, source)
    if keys.integer("expert_count", 0, low=0):
        raise keys.fail(f"{architecture}.expert_count", "0 (a dense model)")
    context = keys.integer("context_length")
    if 0 < keys.integer("attention.sliding_window", 0, low=0) < context:
        raise keys.fail(f"{architecture}.attention.sliding_window", f"absent or at least the context length {context}")
    heads = keys.integer("attention.head_count")
    vocab_size = _vocab_size(keys, tensors)
    ends = [f"tokenizer.ggml.{name}" for name in END_KEYS if f"tokenizer.ggml.{name}" in metadata]
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": vocab_size,
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(keys, context),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "eos_token_id": [keys.token_id(key, vocab_size) for key in ends],
    }
    if (head_dim := _head_dim(keys)) is not None:
        config["head_dim"] = head_dim
    if "tokenizer.ggml.bos_token_id" in metadata:
        config["bos_token_id"] = keys.token_id("tokenizer.ggml.bos_token_id", vocab_size)
    return config


def _vocab_size(keys: _Keys, tensors: Mapping[str, GGUFTensor]) -> int:
    """The rows of the embedding; the key, which older files lack, must agree."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise LoadError(f"{keys.source}: has no tensor token_embd.weight (a file of vocabulary alone is not a model)")
    rows = embedding.shape[0]
    if keys.integer("vocab_size", rows) != rows:
        raise keys.fail(f"{keys.prefix}vocab_size", f"the {rows} rows of token_embd.weight")
    return rows


def _head_dim(keys: _Keys) -> int | None:
    """Keys, values and the rotated part must be of one width; None: as config.json's default, hidden size over heads."""
    names = ("attention.key_length", "rope.dimension_count", "attention.value_length")
    widths = [(name, keys.integer(name)) for name in names if keys.has(name)]
    for name, width in widths:
        if width != widths[0][1]:
            raise keys.fail(keys.prefix + name, f"{widths[0][1]} as {keys.prefix}{widths[0][0]}")
    return widths[0][1] if widths else None


def _rope(keys: _Keys, context: int) -> dict[str, Any]:
    scaling = keys.prefix + "rope.scaling."
    for key in keys.metadata:
        if key.startswith(scaling) and key.removeprefix(scaling) not in ROPE_SCALING_KEYS:
            raise LoadError(f"{keys.source}: {key[:80]} is not supported")
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0), "rope_type": "default"}
    kind = keys.metadata.get(scaling + "type", "none")
    if kind == "none":
        if keys.number("rope.scale_linear", 1.0) != 1.0:  # how old files say it
            rope |= {"rope_type": "linear", "factor": keys.number("rope.scale_linear")}
        return rope
    if kind not in ("linear", "yarn"):
        raise keys.fail(scaling + "type", "none, linear or yarn")
    rope |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length", context)
        rope["beta_fast"] = keys.number("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = keys.number("rope.scaling.yarn_beta_slow", 1.0)
    return rope
