"""What one layer keeps per token, in words: the seam between a model and the KV store.

    cache_specs(config, dtype) -> [LayerCacheSpec(layer=0, buffers={"k": Buffer((2, 64), "bfloat16"), "v": ...}), ...]
                                   of int8 with a scale for each head: "k_scale": Buffer((2,), "float32"), "v_scale": ...

A buffer's shape is that of one token; the store lays tokens out as [num_blocks, block_size, *shape] and copies, sizes
and fills buffers without knowing their names.
"""

from dataclasses import dataclass
from math import prod

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Buffer:
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    layer: int
    buffers: dict[str, Buffer]
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return sum(buffer.bytes_per_token for buffer in self.buffers.values())


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What start-up found out: how large the pool is and how long a sequence may get."""

    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_token: int
