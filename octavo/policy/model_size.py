"""What a model's weights are made of, and their bytes, from its config: no tensor is made, and torch is not needed.

The matrices of the products are listed one by one, as they are merged and under the names of their parts in a Hugging Face
folder. Each is kept as floats or as codes:

    int8   codes of 8 bits in groups of 64      8.5 bits a weight; on a GPU groups of 128, 8.25
    int4   codes of 4 bits in groups of 32      5 bits a weight; on a GPU groups of 128, 4.25; the vocabulary, which feels it most, in 8

Both fall back to smaller groups, and then to floats, where columns are not whole groups. Norms, biases and an embedding of its
own stay floats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.model_config import ModelConfig
from octavo.policy.cache_spec import ITEM_BYTES

SCALE_AND_OFFSET = 4  # bytes for each group of codes
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_GROUPS = {8: (64, 32, 16), 4: (32, 16)}  # the first that fits
_GPU_GROUPS = (128, 64, 32, 16)  # a scale costs its kernels more than the CPU's


@dataclass(frozen=True, slots=True)
class Codes:
    """How a quantised matrix is stored or kept."""

    bits: int
    group: int
    order: str = ""  # tells orders of columns apart; empty: as they stand


@dataclass(frozen=True, slots=True)
class Matrix:
    name: str  # qkv, output, gate_up, down or head
    parts: dict[str, int]  # weight -> rows
    columns: int
    bias: bool = False

    @property
    def rows(self) -> int:
        return sum(self.parts.values())


def matrices(config: ModelConfig) -> list[Matrix]:
    """Of all layers, and of the vocabulary, in the order in which they are loaded."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = []
    for layer in range(config.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        heads = {f"{attention}.q_proj.weight": q, f"{attention}.k_proj.weight": kv, f"{attention}.v_proj.weight": kv}
        found += [
            Matrix("qkv", heads, hidden, config.qkv_bias),
            Matrix("output", {f"{attention}.o_proj.weight": hidden}, q, config.output_bias),
            Matrix("gate_up", {f"{mlp}.gate_proj.weight": inner, f"{mlp}.up_proj.weight": inner}, hidden, config.mlp_bias),
            Matrix("down", {f"{mlp}.down_proj.weight": hidden}, inner, config.mlp_bias),
        ]
    return [*found, Matrix("head", {EMBEDDING if config.tie_embeddings else HEAD: config.vocab_size}, hidden)]


def largest_matrix(config: ModelConfig) -> int:
    """Numbers of the largest one a file has."""
    return max(rows * one.columns for one in matrices(config) for rows in one.parts.values())


def requantised(name: str, columns: int, quantization: str, tied: bool, device: str) -> Codes | None:
    """What the matrix `name` becomes where `quantization` is int8 or int4; None where it stays floats. `device`: cpu or cuda"""
    if name == EMBEDDING and not tied:
        return None
    bits = 8 if quantization == "int8" or name in (EMBEDDING, HEAD) else 4
    groups = _GPU_GROUPS if device == "cuda" else _GROUPS[bits]
    return next((Codes(bits, group) for group in groups if columns % group == 0), None)


@dataclass(frozen=True, slots=True)
class Kept:
    """A matrix as a program keeps it."""

    matrix: Matrix
    codes: Codes | None  # None: floats
    nbytes: int


def kept_matrices(
    config: ModelConfig, stored: Mapping[str, Codes | None], nbytes: Callable[[Matrix, Codes | None], int]
) -> list[Kept]:
    """`stored`: how each weight comes, by its name; `nbytes`: of a matrix, as the program lays it out."""
    found = []
    for matrix in matrices(config):
        codes = _merged([stored.get(part) for part in matrix.parts])
        found.append(Kept(matrix, codes, nbytes(matrix, codes)))
    return found


def _merged(parts: list[Codes | None]) -> Codes | None:
    """Parts take the most bits and the smallest group of any, and become floats where one is no code, or in another order."""
    codes = [part for part in parts if part is not None]
    if len(codes) < len(parts) or len({part.order for part in codes}) > 1:
        return None
    return Codes(max(part.bits for part in codes), min(part.group for part in codes), codes[0].order)


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """As torch holds them."""
    return num_parameters(config) * ITEM_BYTES[dtype]


def num_parameters(config: ModelConfig) -> int:
    listed = matrices(config)
    biases = sum(matrix.rows for matrix in listed if matrix.bias)
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return sum(matrix.rows * matrix.columns for matrix in listed) + biases + embedding + num_norms(config)


def num_norms(config: ModelConfig) -> int:
    in_layer = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    return config.num_layers * in_layer + config.hidden_size
