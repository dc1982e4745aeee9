"""Copies of whole blocks, all reads before any write."""

import torch
from torch import Tensor


def copy_blocks(buffers: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copies block `source` onto block `target` for every pair. buffers: each [num_blocks, ...]"""
    sources, targets = torch.tensor(pairs).unbind(1)
    for buffer in buffers:
        buffer[targets] = buffer[sources]
