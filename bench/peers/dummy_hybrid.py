"""A GGUF file of random packed weights with the shape of Qwen3.5-0.8B, for timing: 18 recurrent layers and 6 with attention."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.dummy_gguf import BLOCKS, packed


@dataclass(frozen=True, slots=True)
class HybridShape:
    layers: int = 24
    interval: int = 4  # every layer with this number, counted from one, has attention
    hidden: int = 1024
    inner: int = 3584
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 256
    rotated: int = 64
    delta_heads: int = 16  # of q and k, and of v
    delta_dim: int = 128
    conv_width: int = 4
    vocab: int = 248320

    def matrices(self, layer: int) -> dict[str, tuple[int, int]]:
        """Returns the shapes of a layer's packed matrices."""
        mlp = {"ffn_gate": (self.inner, self.hidden), "ffn_up": (self.inner, self.hidden), "ffn_down": (self.hidden, self.inner)}
        wide = self.delta_heads * self.delta_dim
        if not self.has_attention(layer):
            return {"attn_qkv": (3 * wide, self.hidden), "attn_gate": (wide, self.hidden), "ssm_out": (self.hidden, wide), **mlp}
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"attn_q": (2 * query, self.hidden), "attn_k": (key, self.hidden), "attn_v": (key, self.hidden)}
        return {**attention, "attn_output": (self.hidden, query), **mlp}

    def has_attention(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0

    def token_bytes(self, kind: str) -> int:
        """Returns the bytes of matrices that a token reads."""
        numbers = sum(rows * columns for layer in range(self.layers) for rows, columns in self.matrices(layer).values())
        return (numbers + self.vocab * self.hidden) // BLOCKS[kind][0] * BLOCKS[kind][1]


def write(path: Path, shape: HybridShape, kind: str) -> Path:
    """Writes the file, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        _write(unfinished, shape, kind)
        unfinished.rename(path)
    return path


def _write(path: Path, shape: HybridShape, kind: str) -> None:
    import gguf

    writer, dice = gguf.GGUFWriter(path, "qwen35"), np.random.default_rng(0)
    _write_keys(writer, shape)

    def add(name: str, size: tuple[int, ...]) -> None:
        writer.add_tensor(f"{name}.weight", packed(dice, size, kind), raw_dtype=gguf.GGMLQuantizationType[kind])

    def floats(name: str, values: Any) -> None:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))

    add("token_embd", (shape.vocab, shape.hidden))
    floats("output_norm.weight", np.ones(shape.hidden))
    for layer in range(shape.layers):
        at, heads = f"blk.{layer}", shape.delta_heads
        for name, size in shape.matrices(layer).items():
            add(f"{at}.{name}", size)
        for name in ("attn_norm", "post_attention_norm"):
            floats(f"{at}.{name}.weight", np.ones(shape.hidden))
        if shape.has_attention(layer):
            for name in ("attn_q_norm", "attn_k_norm"):
                floats(f"{at}.{name}.weight", np.ones(shape.head_dim))
            continue
        for name in ("ssm_beta", "ssm_alpha"):
            floats(f"{at}.{name}.weight", dice.standard_normal((heads, shape.hidden)) / shape.hidden**0.5)
        floats(f"{at}.ssm_conv1d.weight", dice.standard_normal((3 * heads * shape.delta_dim, shape.conv_width)) / 2)
        floats(f"{at}.ssm_a", -dice.uniform(0.01, 8, heads))
        floats(f"{at}.ssm_dt.bias", dice.standard_normal(heads))
        floats(f"{at}.ssm_norm.weight", np.ones(shape.delta_dim))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def _write_keys(writer: Any, shape: HybridShape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(shape.rotated)
    axis = shape.rotated // 6 + 1
    writer.add_rope_dimension_sections([axis, axis, shape.rotated // 2 - 2 * axis, 0])
    writer.add_ssm_conv_kernel(shape.conv_width)
    writer.add_ssm_state_size(shape.delta_dim)
    writer.add_ssm_group_count(shape.delta_heads)
    writer.add_ssm_time_step_rank(shape.delta_heads)
    writer.add_ssm_inner_size(shape.delta_heads * shape.delta_dim)
    writer.add_full_attention_interval(shape.interval)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")
