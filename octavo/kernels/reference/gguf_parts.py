"""What all quantised kinds of GGUF share: the parts that their numbers are made of, and fields of a few bits in bytes."""

from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """What quantised numbers are made of: x = scale * (code - middle) + offset. With a table, table[code] stands for the code."""

    codes: Tensor  # [groups, numbers] uint8, a copy: may be written
    middle: int
    scale: Tensor  # [groups, runs] float32: a run is as many numbers as share a scale
    offset: Tensor | None = None  # [groups, runs] float32, where it is not zero
    table: Tensor | None = None  # [16] uint8, where codes of 4 bits stand for numbers that are not evenly spaced


def half(two_bytes: Tensor) -> Tensor:
    return two_bytes.view(torch.float16).float()  # [groups, 1]


def pairs(groups: Tensor) -> Tensor:
    """Returns the codes in the last 16 bytes of each group."""
    low, high = groups & 15, groups >> 4  # of the scales too: a pass over contiguous bytes is faster than one that skips some
    return torch.cat([low[:, -16:], high[:, -16:]], dim=-1)  # [groups, 32]


def unpack(packed: Tensor, bits: int, row: int) -> Tensor:
    """Returns fields of `bits` bits in their order: the lowest fields of the first `row` bytes, their next fields, ..., the next row."""
    words = packed.flatten().view(torch.int32).view(packed.shape[0], -1, row // 4)  # four bytes at once
    mask = 0x01010101 * ((1 << bits) - 1)
    fields = [(words >> shift).bitwise_and_(mask) for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=2).view(torch.uint8).flatten(1)  # [groups, rows, fields, row]
