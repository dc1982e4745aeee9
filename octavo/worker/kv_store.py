"""The bytes of the cache: named buffers per layer, laid out as a backend likes them. It chooses no id; plans do.

    paged         [num_blocks, block_size, *token]     copies move whole blocks, all reads before any write; in either layout
    contiguous    [num_rows, max_len, *token]          a fork copies its parent's row

Memory is reserved but not touched: a large pool costs nothing until it is used.
"""

from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.cache_layout import Layout, empty_cache
from octavo.kernels.ops import copy_blocks
from octavo.messages import StepPlan
from octavo.policy.block_pool import NULL_BLOCK
from octavo.policy.cache_spec import LayerCacheSpec

Caches = list[dict[str, Tensor]]  # per layer, by buffer name
CPU = torch.device("cpu")
NO_CODE = -128  # no number gets it: codes go from -127 to 127


class KVStore(Protocol):
    caches: Caches

    def apply(self, plan: StepPlan) -> None:
        """What a plan moves inside the cache, before its forward."""


def _allocate(specs: list[LayerCacheSpec], places: int, tokens: int, device: torch.device, layout: Layout = "nhd") -> Caches:
    return [
        {
            name: empty_cache(layout, (places, tokens, *buffer.shape), getattr(torch, buffer.dtype), device)
            for name, buffer in spec.buffers.items()
        }
        for spec in specs
    ]


def poison(caches: Caches, block: int) -> None:
    """Fill a block with NaN: whoever reads it before writing it shows at once. Codes have their NaN in the scale."""
    for cache in caches:
        for buffer in cache.values():
            buffer[block] = torch.nan if buffer.is_floating_point() else NO_CODE


class PagedStore:
    def __init__(
        self, specs: list[LayerCacheSpec], num_blocks: int, block_size: int, device: torch.device = CPU, layout: Layout = "nhd"
    ) -> None:
        self.caches = _allocate(specs, num_blocks, block_size, device, layout)
        for cache in self.caches:
            for buffer in cache.values():
                buffer[NULL_BLOCK] = 0  # tables are padded with it

    def apply(self, plan: StepPlan) -> None:
        if plan.copies:
            copy_blocks([buffer for cache in self.caches for buffer in cache.values()], plan.copies)


class ContiguousStore:
    def __init__(self, specs: list[LayerCacheSpec], num_rows: int, max_len: int, device: torch.device = CPU) -> None:
        self.caches = _allocate(specs, num_rows, max_len, device)

    def apply(self, plan: StepPlan) -> None:
        if plan.row_forks:
            rows, sources = [fork.row for fork in plan.row_forks], [fork.source for fork in plan.row_forks]
            for cache in self.caches:
                for buffer in cache.values():
                    buffer[rows] = buffer[sources]  # a copy is taken first, so that rows can exchange places
