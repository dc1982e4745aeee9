"""The bytes of a model's weights, counted from its config: no tensor is made, and torch is not needed.

The matrices of the linear layers are listed one by one, because quantised they are kept in groups of each row:

    int8   a byte a weight,          scale and offset of 2 bytes each for 64 weights      8.5 bits a weight
    int4   a byte for two weights,   scale and offset of 2 bytes each for 32 weights        5 bits a weight

Embeddings, norms and biases stay in the dtype of the run. Quantised sizes answer a what-if: no engine runs them yet.
"""

from typing import Literal, get_args

from octavo.model_config import ModelConfig
from octavo.policy.cache_spec import ITEM_BYTES, Buffer, LayerCacheSpec

Quantization = Literal["none", "int8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
_BITS_AND_GROUP = {"int8": (8, 64), "int4": (4, 32)}
_SCALE_AND_OFFSET = 4  # bytes


def weight_bytes(config: ModelConfig, dtype: str, quantization: Quantization = "none") -> int:
    layer = sum(_matrix_bytes(rows, columns, dtype, quantization) for rows, columns in _matrices(config))
    return config.num_layers * layer + _other_parameters(config) * ITEM_BYTES[dtype]


def num_parameters(config: ModelConfig) -> int:
    return config.num_layers * sum(rows * columns for rows, columns in _matrices(config)) + _other_parameters(config)


def int8_cache_specs(config: ModelConfig) -> list[LayerCacheSpec]:
    """A what-if, too: a byte a value, and a float32 scale for each head of a token."""
    token, scale = Buffer((config.num_kv_heads, config.head_dim), "int8"), Buffer((config.num_kv_heads,), "float32")
    buffers = {"k": token, "v": token, "k_scale": scale, "v_scale": scale}
    return [LayerCacheSpec(layer, buffers, window) for layer, window in enumerate(config.windows)]


def _matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """(rows, columns) of the linear layers of one decoder layer: qkv, attention output, gate and up, down."""
    hidden, inner, q = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return [(q + 2 * config.num_kv_heads * config.head_dim, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]


def _other_parameters(config: ModelConfig) -> int:
    """Embeddings, norms and biases."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    in_layer = 2 * hidden  # norms
    in_layer += 2 * config.head_dim if config.qk_norm else 0
    in_layer += q + 2 * kv if config.qkv_bias else 0
    in_layer += hidden if config.output_bias else 0
    in_layer += 2 * inner + hidden if config.mlp_bias else 0
    ends = 1 if config.tie_embeddings else 2
    return config.num_layers * in_layer + hidden + ends * config.vocab_size * hidden


def _matrix_bytes(rows: int, columns: int, dtype: str, quantization: Quantization) -> int:
    if quantization == "none":
        return rows * columns * ITEM_BYTES[dtype]
    bits, group = _BITS_AND_GROUP[quantization]
    return rows * (-(-columns * bits // 8) + -(-columns // group) * _SCALE_AND_OFFSET)
