"""MXFP4 in folders, as gpt-oss has it: floats of 4 bits (e2m1) in blocks of 32 columns that share a power of two.

    MODULE_blocks   uint8 [..., rows, k / 32, 16]   a byte: two neighbours, the first in its lower half
    MODULE_scales   uint8 [..., rows, k / 32]       2^(scale - 127)

The packed form holds both exactly. A scale that is 2^39 times smaller than the largest of its matrix becomes zero.
"""

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.kernels.reference.table_kinds import FP4_MIDDLE, FP4_TABLE, halved_powers
from octavo.quant.packed import PackedWeight, pack

BLOCK = 32


def fold_mxfp4(blocks: Tensor, scales: Tensor, name: str) -> PackedWeight:
    """Returns one matrix with the rows of all leading dimensions. `name`: of the module, for messages."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise LoadError(f"{name}: blocks and scales must be uint8, got {blocks.dtype} and {scales.dtype}")
    if blocks.dim() < 3 or blocks.shape[-1] != BLOCK // 2 or blocks.shape[:-1] != scales.shape or not blocks.numel():
        raise LoadError(f"{name}: blocks {list(blocks.shape)} and scales {list(scales.shape)} are no matrix in blocks of {BLOCK} columns")
    per_row = blocks.shape[-2]
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).view(-1, per_row * BLOCK)
    scale = halved_powers(scales).view(-1, per_row)
    return pack(name, 4, codes, scale, scale * -FP4_MIDDLE, table=FP4_TABLE)
