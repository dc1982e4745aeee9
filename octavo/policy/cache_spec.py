"""What one layer keeps per token, in words: the seam between a model and the KV store.

    cache_specs(config, dtype) -> [LayerCacheSpec(layer=0, buffers={"k": Buffer((2, 64), "bfloat16"), "v": ...}), ...]
                                   of int8 with a scale for each head: "k_scale": Buffer((2,), "float32"), "v_scale": ...

A buffer's shape is that of one token; the store lays tokens out as [num_blocks, block_size, *shape] and copies, sizes
and fills buffers without knowing their names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from octavo.errors import ConfigError
from octavo.policy.cache_group import FULL, CacheGroup

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
CLOSE = 1.25  # kinds whose numbers of layers differ by less get one group each: padding costs less than more tables would


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
    bytes_per_token: int  # of a block: its bytes are this times the tokens that are kept, whatever group has it
    groups: tuple[CacheGroup, ...] = (FULL,)
    context_ranks: int = 1  # that share the tokens of a block equally

    @property
    def kept_tokens(self) -> int:
        """The tokens of a block that one rank keeps: all, unless ranks share a context."""
        return self.block_size // self.context_ranks

    def concurrency(self, step_tokens: int) -> float:
        """Returns how many sequences of the greatest length the pool holds. `step_tokens`: the most that a plan computes"""
        if self.groups[0].window is None and len(self.groups) == 1:
            return (self.num_blocks - 1) * self.block_size / self.max_model_len
        return (self.num_blocks - 1) / blocks_for(self.groups, self.block_size, self.max_model_len, step_tokens)


def blocks_for(groups: Sequence[CacheGroup], block_size: int, num_tokens: int, step_tokens: int) -> int:
    """Returns the most blocks that a sequence of this many tokens holds at once, in all groups."""
    return sum([group.blocks_for(num_tokens, group.links * block_size, step_tokens) for group in groups])


def one_group(specs: Sequence[LayerCacheSpec]) -> tuple[CacheGroup, ...]:
    """Returns one full group of all layers: layers with a window read no further than it, and keep their blocks."""
    return (CacheGroup(tuple(spec.layer for spec in specs)),)


def token_bytes(specs: Sequence[LayerCacheSpec], groups: Sequence[CacheGroup]) -> int:
    """Returns the bytes of a block for each of the `block_size` tokens of a link: those of the group that needs most."""
    sizes = {spec.layer: spec.bytes_per_token for spec in specs}
    return max(group.links * sum(sizes[layer] for layer in group.layers) for group in groups)


def split_layers(specs: Sequence[LayerCacheSpec]) -> tuple[CacheGroup, ...]:
    """Returns groups whose blocks have equal bytes, the full ones first."""
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for spec in specs:
        kinds.setdefault((spec.window, spec.bytes_per_token), []).append(spec.layer)
    counts = [len(layers) for layers in kinds.values()]
    in_a_group = max(counts) if max(counts) < CLOSE * min(counts) else min(counts)
    most_bytes = max(num_bytes for _, num_bytes in kinds)
    groups = []
    for (window, num_bytes), layers in kinds.items():
        if most_bytes % num_bytes:
            raise ConfigError(f"layer {layers[0]} keeps {num_bytes} bytes a token, which does not divide {most_bytes} of another layer")
        number = -(-len(layers) // in_a_group)
        groups += [CacheGroup(tuple(layers[first::number]), window, most_bytes // num_bytes) for first in range(number)]
    return tuple(sorted(groups, key=lambda group: group.window is not None))
