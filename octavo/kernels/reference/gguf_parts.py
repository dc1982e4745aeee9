"""Common parts of all quantised kinds of GGUF: the components of their numbers, and bit fields in bytes."""

from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """The components of quantised numbers: x = scale * (code - middle) + offset. With a table, table[code] replaces the code."""

    codes: Tensor  # [groups, numbers] uint8, a copy that may be modified
    middle: int
    scale: Tensor  # [groups, runs] float32: the numbers of a run share a scale
    offset: Tensor | None = None  # [groups, runs] float32, if it is not zero
    table: Tensor | None = None  # [16] uint8, if 4-bit codes are indices of unevenly spaced numbers


def half(two_bytes: Tensor) -> Tensor:
    return two_bytes.view(torch.float16).float()  # [groups, 1]


def pairs(groups: Tensor) -> Tensor:
    """Returns the codes in the last 16 bytes of each group."""
    low, high = groups & 15, groups >> 4  # also computed for the scales: a pass over contiguous bytes is faster than a strided one
    return torch.cat([low[:, -16:], high[:, -16:]], dim=-1)  # [groups, 32]


def unpack(packed: Tensor, bits: int, row: int) -> Tensor:
    """Returns fields of `bits` bits in their order: the lowest fields of the first `row` bytes, their next fields, ..., the next row."""
    words = packed.flatten().view(torch.int32).view(packed.shape[0], -1, row // 4)  # four bytes at once
    mask = 0x01010101 * ((1 << bits) - 1)
    fields = [(words >> shift).bitwise_and_(mask) for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=2).view(torch.uint8).flatten(1)  # [groups, rows, fields, row]
