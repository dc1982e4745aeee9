"""The memory of the cache: named buffers per layer, in the backend's layout. Plans choose all ids.

    paged         [num_blocks, block_size, *token]     copies move whole blocks, all reads before any write; in either layout
    contiguous    [num_rows, max_len, *token]          a fork copies its parent's row
    state         [num_states, *sequence]              beside either: a step reads one slot of a sequence and writes another

With several cache groups, the first layers of all groups share memory, and so do the second layers, and so on:

    block        1        2        3        4            one pool: each block belongs to one group at a time
    layer 0    [ k v ]  [  -  ]  [ k v ]  [  -  ]        of the full group
    layer 1    [  -  ]  [ k v ]  [  -  ]  [ k v ]        of the group with a window: the same bytes, viewed in another shape

Memory is reserved but not touched: a large pool costs nothing until it is used.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.cache_layout import Layout, empty_cache, view_cache
from octavo.kernels.ops import copy_blocks
from octavo.messages import StepPlan
from octavo.policy.cache_group import FULL, CacheGroup
from octavo.policy.cache_spec import Buffer, LayerCacheSpec

Caches = list[dict[str, Tensor]]  # per layer, by buffer name
CPU = torch.device("cpu")
NO_CODE = -128  # never a quantised value: those range from -127 to 127


class KVStore(Protocol):
    caches: Caches  # of tokens
    states: Caches  # of sequences: the null slot, where each begins, has zeros

    def apply(self, plan: StepPlan) -> None:
        """Applies the copies of a plan inside the cache, before its forward."""


def _allocate(specs: list[LayerCacheSpec], places: int, tokens: int, device: torch.device, layout: Layout = "nhd") -> Caches:
    return [
        {
            name: empty_cache(layout, (places, tokens, *buffer.shape), getattr(torch, buffer.dtype), device)
            for name, buffer in spec.buffers.items()
        }
        for spec in specs
    ]


def _states(specs: list[LayerCacheSpec], num_states: int, device: torch.device) -> Caches:
    def slots(buffer: Buffer) -> Tensor:
        return torch.empty(num_states, *buffer.shape, dtype=getattr(torch, buffer.dtype), device=device)

    states = [{name: slots(buffer) for name, buffer in spec.state.items()} for spec in specs]
    clear_first(states)
    return states


def _fork_rows(caches: Caches, plan: StepPlan) -> None:
    rows, sources = [fork.row for fork in plan.row_forks], [fork.source for fork in plan.row_forks]
    for cache in caches:
        for buffer in cache.values():
            buffer[rows] = buffer[sources]  # indexing copies first, so rows can exchange their contents


def clear_first(caches: Caches) -> None:
    """Clears what is read and never written: the null block, which tables have as padding and behind a freed window, or the null slot."""
    for cache in caches:
        for buffer in cache.values():
            buffer[0] = 0


def poison(caches: Caches, block: int, slots: slice = slice(None)) -> None:
    """Fills slots of a block with NaN, so that reading them before writing them is detected. Quantised values have theirs in the scale."""
    for cache in caches:
        for buffer in cache.values():
            buffer[block, slots] = torch.nan if buffer.is_floating_point() else NO_CODE


class PagedStore:
    def __init__(
        self, specs: list[LayerCacheSpec], num_blocks: int, block_size: int, device: torch.device = CPU, layout: Layout = "nhd",
        groups: Sequence[CacheGroup] = (FULL,), num_states: int = 0,
    ) -> None:  # fmt: skip
        self.states = _states(specs, num_states, device)
        if len(groups) == 1:
            self.caches = _allocate(specs, num_blocks, groups[0].links * block_size, device, layout)
            self._owners = self.caches
        else:
            self.caches, self._owners = _allocate_shared(specs, groups, num_blocks, block_size, device, layout)
        clear_first(self._owners)

    def apply(self, plan: StepPlan) -> None:
        if plan.copies:  # memory that layers share is copied once
            copy_blocks([buffer for cache in self._owners for buffer in cache.values()], plan.copies)


def _allocate_shared(
    specs: list[LayerCacheSpec], groups: Sequence[CacheGroup], num_blocks: int, block_size: int, device: torch.device, layout: Layout
) -> tuple[Caches, Caches]:
    """Returns the caches of all layers, and for each piece of memory the cache of one layer that uses it."""
    by_layer = {spec.layer: spec for spec in specs}
    caches: dict[int, dict[str, Tensor]] = {}
    owners: Caches = []
    for sharing in zip_longest(*(group.layers for group in groups)):  # groups with fewer layers have padding here
        members = [(by_layer[layer], group.links * block_size) for layer, group in zip(sharing, groups) if layer is not None]
        owner, span = members[0]
        for spec, other_span in members[1:]:
            _check_equal_bytes(owner, span, spec, other_span)
        memory = [torch.empty(num_blocks, size, dtype=torch.uint8, device=device) for size in _block_bytes(owner, span)]
        for spec, span in members:
            named = zip(spec.buffers.items(), memory, strict=True)
            caches[spec.layer] = {
                name: view_cache(layout, (num_blocks, span, *buffer.shape), getattr(torch, buffer.dtype), part)
                for (name, buffer), part in named
            }
        owners.append(caches[owner.layer])
    return [caches.get(spec.layer, {}) for spec in specs], owners


def _check_equal_bytes(one: LayerCacheSpec, span: int, other: LayerCacheSpec, other_span: int) -> None:
    sizes, other_sizes = _block_bytes(one, span), _block_bytes(other, other_span)
    if sizes != other_sizes:
        raise ConfigError(
            f"layers {one.layer} and {other.layer} cannot share the blocks of the KV cache: in a block, "
            f"the buffers of one have {sizes} bytes, and those of the other {other_sizes}"
        )


def _block_bytes(spec: LayerCacheSpec, span: int) -> list[int]:
    """Returns the bytes of each buffer in a block of `span` tokens."""
    return [span * buffer.nbytes for buffer in spec.buffers.values()]


class ContiguousStore:
    def __init__(self, specs: list[LayerCacheSpec], num_rows: int, max_len: int, device: torch.device = CPU, num_states: int = 0) -> None:
        self.caches, self.states = _allocate(specs, num_rows, max_len, device), _states(specs, num_states, device)

    def apply(self, plan: StepPlan) -> None:
        if plan.row_forks:
            _fork_rows(self.caches, plan)
