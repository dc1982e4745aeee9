"""GGUF files of random packed weights, for timing: a mixture of the Qwen3-MoE family, and a dense Qwen3 whose active part is as large."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCKS = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}  # numbers and bytes of a block
SCALES = {"Q4_0": ((0, 0.2),), "Q8_0": ((0, 0.013),), "Q4_K": ((0, 0.0065), (2, 0.05)), "Q6_K": ((208, 0.0014),)}  # offset of a half, value


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int = 16
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 16384
    experts: int = 32
    chosen: int = 4
    inner: int = 768  # of an expert; the dense model has as much as a token's experts have together

    def matrices(self, mixture: bool) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a layer's packed matrices."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"attn_q": (query, self.hidden), "attn_k": (key, self.hidden), "attn_v": (key, self.hidden)}
        attention["attn_output"] = (self.hidden, query)
        if mixture:
            up, down = (self.experts, self.inner, self.hidden), (self.experts, self.hidden, self.inner)
            return {**attention, "ffn_gate_exps": up, "ffn_up_exps": up, "ffn_down_exps": down}
        wide = self.chosen * self.inner
        return {**attention, "ffn_gate": (wide, self.hidden), "ffn_up": (wide, self.hidden), "ffn_down": (self.hidden, wide)}

    def active_bytes(self, kind: str) -> int:
        """Returns the bytes of matrices that a token reads."""
        numbers = self.layers * sum(np.prod(shape) for shape in self.matrices(mixture=False).values()) + self.vocab * self.hidden
        return int(numbers) // BLOCKS[kind][0] * BLOCKS[kind][1]


def write(path: Path, shape: Shape, kind: str, mixture: bool) -> Path:
    """Writes the file, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        _write(unfinished, shape, kind, mixture)
        unfinished.rename(path)
    return path


def _write(path: Path, shape: Shape, kind: str, mixture: bool) -> None:
    import gguf

    writer, dice = gguf.GGUFWriter(path, "qwen3moe" if mixture else "qwen3"), np.random.default_rng(0)
    _write_keys(writer, shape, mixture)

    def add(name: str, size: tuple[int, ...]) -> None:
        writer.add_tensor(f"{name}.weight", packed(dice, size, kind), raw_dtype=gguf.GGMLQuantizationType[kind])

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    add("token_embd", (shape.vocab, shape.hidden))
    add("output", (shape.vocab, shape.hidden))
    norm("output_norm", shape.hidden)
    for layer in range(shape.layers):
        for name, size in shape.matrices(mixture).items():
            add(f"blk.{layer}.{name}", size)
        if mixture:
            router = dice.standard_normal((shape.experts, shape.hidden), np.float32) / shape.hidden**0.5
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
        for name, length in (("attn_norm", shape.hidden), ("ffn_norm", shape.hidden)):
            norm(f"blk.{layer}.{name}", length)
        for name in ("attn_q_norm", "attn_k_norm"):
            norm(f"blk.{layer}.{name}", shape.head_dim)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def _write_keys(writer: Any, shape: Shape, mixture: bool) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.chosen * shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")
    if mixture:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
        writer.add_expert_feed_forward_length(shape.inner)


def packed(dice: np.random.Generator, size: tuple[int, ...], kind: str) -> np.ndarray:
    """Returns random blocks whose numbers are small enough for deep models to stay finite."""
    numbers, length = BLOCKS[kind]
    blocks = dice.integers(0, 256, (*size[:-1], size[-1] // numbers, length), np.uint8)
    for offset, value in SCALES[kind]:
        blocks[..., offset : offset + 2] = np.array([value / size[-1] ** 0.5], np.float16).view(np.uint8)
    return blocks.reshape(*size[:-1], -1)
