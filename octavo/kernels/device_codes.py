"""A quantised matrix in the format of the GPU kernels: codes packed into 16-bit words, scale and offset as a pair.

    w[row, order[c]] = (scale[row, c // group] * code[row, c] + offset[row, c // group]) * factor        with a table: table[code[row, c]]

Columns are grouped in blocks of 16 / bits spans; a span has 32 columns (16 if a group has no more). A word holds the codes of
the same column of every span, so that one shift and one mask extract a whole span from the words of a block:

    words [n, blocks * span] int16    4 bits: columns 96 + i | 64 + i | 32 + i | i of a block; 8 bits: 32 + i | i; i is lowest
    scales [n, groups] int32          offset (upper half) and scale (lower half), both float16

Rows are padded to whole blocks with scales and offsets of zero. The words of a block are in the order in which the tensor cores
read columns: four threads share them, and the words of each thread are contiguous. The columns i of a span of 32, of 16:

    0 1 16 17 8 9 24 25 | 2 3 18 19 10 11 26 27 | 4 5 20 21 12 13 28 29 | 6 7 22 23 14 15 30 31      0 1 8 9 | 2 3 10 11 | ...
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import layout

WORD_BITS, MAX_SPAN = layout.WORD_BITS, layout.MAX_SPAN


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCodes:
    bits: int  # 4 or 8
    group: int  # 16, 32, 64 or 128
    size: int  # columns, without padding
    words: Tensor
    scales: Tensor
    factor: float  # a power of two
    order: Tensor | None  # [size]: the input column of each column of codes; None: the original order
    table: Tensor | None = None  # [16] uint8: the value of each 4-bit code, if values are not evenly spaced
    floats: bool = False  # the table is that of MXFP4: codes are 4-bit floats, which kernels may compute without a table

    def __post_init__(self) -> None:
        assert self.words.is_contiguous() and self.scales.is_contiguous()
        assert self.words.shape == (len(self), self.blocks * self.span)
        assert self.scales.shape == (len(self), -(-self.blocks * self.block // self.group))
        assert self.table is None or (self.bits == 4 and self.table.shape == (16,) and self.table.dtype == torch.uint8)

    def __len__(self) -> int:
        """Returns the number of rows, which is the width of a product."""
        return len(self.words)

    @property
    def span(self) -> int:
        return min(self.group, MAX_SPAN)

    @property
    def block(self) -> int:
        return block_size(self.bits, self.group)

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block)


def zero_codes(n: int, size: int, bits: int, group: int, device: torch.device | str) -> DeviceCodes:
    """Returns a matrix of zeros, to test a kernel on, or (on the device `meta`) to evaluate a rule for."""
    columns = -(-size // block_size(bits, group)) * block_size(bits, group)
    words = torch.zeros(n, columns * bits // WORD_BITS, dtype=torch.int16, device=device)
    scales = torch.zeros(n, -(-columns // group), dtype=torch.int32, device=device)
    return DeviceCodes(bits, group, size, words, scales, 1.0, None)


def block_size(bits: int, group: int) -> int:
    """Returns the number of columns whose codes share words."""
    return WORD_BITS // bits * min(group, MAX_SPAN)
