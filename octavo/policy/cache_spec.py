"""What one layer stores, per token and per sequence: the interface between a model and the KV store.

    cache_specs(config, dtype) -> [LayerCacheSpec(layer=0, buffers={"k": Buffer((2, 64), "bfloat16"), "v": ...}), ...]
                                   of int8 with a scale for each head: "k_scale": Buffer((2,), "float32"), "v_scale": ...

A buffer's shape is that of one token. The store lays tokens out as [num_blocks, block_size, *shape] and copies, sizes
and fills buffers without interpreting their names. The state of a sequence is one value, whatever its length: [num_states, *shape].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from octavo.errors import ConfigError
from octavo.policy.cache_group import FULL, CacheGroup, WindowGroup

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
CLOSE = 1.25  # kinds of layers whose counts differ by a smaller factor get one group each: padding costs less than extra tables
MOST_GROUPS = 8  # of layers of equal number: each has a table to fill and read in every step


@dataclass(frozen=True, slots=True)
class Buffer:
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    layer: int
    buffers: dict[str, Buffer]  # of each token; a layer without any belongs to no cache group
    window: int | None = None
    state: dict[str, Buffer] = field(default_factory=dict)  # of each sequence, computed from all of its tokens so far

    @property
    def bytes_per_token(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @property
    def state_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.state.values())


def slot_bytes(specs: Sequence[LayerCacheSpec]) -> int:
    """Returns the bytes of a state slot, which is 0 without recurrent layers."""
    return sum(spec.state_bytes for spec in specs)


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The cache dimensions found at start-up: the size of the pool and the maximum length of a sequence."""

    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_token: int  # a block has this many bytes for each token it stores, in every group
    groups: tuple[CacheGroup, ...] = (FULL,)
    context_ranks: int = 1  # ranks that share the tokens of a block equally
    state_bytes: int = 0  # of one state slot, in all layers
    num_states: int = 0  # state slots, the null one included; 0: the model has no recurrent layers

    @property
    def kept_tokens(self) -> int:
        """The tokens of a block that one rank stores: all, unless ranks share a context."""
        return self.block_size // self.context_ranks

    def concurrency(self, step_tokens: int) -> float:
        """Returns how many sequences of the maximum length fit into the pool. `step_tokens`: the most that a plan computes

        A sequence holds more than its window only while a step computes it, and all sequences together compute that many tokens.
        """
        if len(self.groups) == 1 and not self.groups[0].frees:
            return (self.num_blocks - 1) * self.block_size / self.max_model_len
        one, more = (blocks_for(self.groups, self.block_size, self.max_model_len, tokens) for tokens in (step_tokens, 1))
        fit = (self.num_blocks - 1) / one
        return fit if fit < 1 else 1 + (self.num_blocks - 1 - one) / more


def blocks_for(groups: Sequence[CacheGroup], block_size: int, num_tokens: int, step_tokens: int) -> int:
    """Returns how many blocks a sequence of this many tokens can hold at once, in all groups."""
    return sum([group.blocks_for(num_tokens, group.links * block_size, step_tokens) for group in groups])


def one_group(specs: Sequence[LayerCacheSpec]) -> tuple[CacheGroup, ...]:
    """Returns one full group of all layers that store tokens: layers with a window do not read beyond it, but keep their blocks."""
    return (CacheGroup(tuple(spec.layer for spec in specs if spec.buffers)),)


def token_bytes(specs: Sequence[LayerCacheSpec], groups: Sequence[CacheGroup]) -> int:
    """Returns the bytes of a block for each of the `block_size` tokens of a link: those of the group that needs the most."""
    sizes = {spec.layer: spec.bytes_per_token for spec in specs}
    return max(group.links * sum(sizes[layer] for layer in group.layers) for group in groups)


def split_layers(specs: Sequence[LayerCacheSpec]) -> tuple[CacheGroup, ...]:
    """Returns groups whose blocks have equal bytes, full groups first; one group of all layers where no memory would be saved."""
    specs = [spec for spec in specs if spec.buffers]
    if all(spec.window is None for spec in specs):
        return one_group(specs)
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for spec in specs:
        kinds.setdefault((spec.window, spec.bytes_per_token), []).append(spec.layer)
    counts = [len(layers) for layers in kinds.values()]
    in_a_group = max(counts) if max(counts) < CLOSE * min(counts) else max(min(counts), -(-len(specs) // MOST_GROUPS))
    most_bytes = max(num_bytes for _, num_bytes in kinds)
    groups: list[CacheGroup] = []
    for (window, num_bytes), layers in kinds.items():
        if most_bytes % num_bytes:
            raise ConfigError(f"layer {layers[0]} keeps {num_bytes} bytes per token, not a divisor of {most_bytes} of another layer")
        number = -(-len(layers) // in_a_group)
        for first in range(number):
            part, links = tuple(layers[first::number]), most_bytes // num_bytes
            groups.append(CacheGroup(part, links) if window is None else WindowGroup(part, links, window))
    kept = token_bytes(specs, groups) * sum(1 / group.links for group in groups if not group.frees)  # of a long sequence, per token
    return tuple(sorted(groups, key=lambda group: group.frees)) if kept < sum(spec.bytes_per_token for spec in specs) else one_group(specs)
