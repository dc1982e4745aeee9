"""GGML's K kinds, taken apart: groups of 256 numbers in 8 or 16 runs, each run with a small integer scale of its own.

    Q2_K:  84 bytes    16 x (scale 4 bits, offset 4 bits) | codes 64 | d f16 | m f16
    Q3_K: 110 bytes    top bits of codes 32 | codes 64 | 16 scales of 6 bits 12 | d f16
    Q4_K: 144 bytes    d f16 | m f16 | 8 scales and 8 offsets of 6 bits 12 | codes 128
    Q5_K: 176 bytes    d f16 | m f16 | 8 scales and 8 offsets of 6 bits 12 | top bits of codes 32 | codes 128
    Q6_K: 210 bytes    codes 128 | top bits of codes 64 | 16 scales i8 | d f16

    Q2_K, Q4_K, Q5_K:  x = (d * scale) * code - (m * offset)        Q3_K, Q6_K:  x = (d * scale) * (code - middle)

A byte holds the codes of numbers 32 (in Q6_K: 64) apart: the lowest bits of a row of bytes are one stretch of numbers, the
next bits the next stretch. d, scale and code have at most 11 + 7 + 5 significant bits, so every product is exact in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """What quantised numbers are made of: x = scale * (code - middle) + offset."""

    codes: Tensor  # [groups, numbers] uint8, nobody else's: may be written
    middle: int
    scale: Tensor  # [groups, runs] float32: a run is as many numbers as share a scale
    offset: Tensor | None  # [groups, runs] float32, where it is not zero


def unpack(packed: Tensor, bits: int, row: int) -> Tensor:
    """Fields of `bits` bits in their order: the lowest fields of the first `row` bytes, their next fields, ..., the next row."""
    words = packed.flatten().view(torch.int32).view(packed.shape[0], -1, row // 4)  # four bytes at once
    mask = 0x01010101 * ((1 << bits) - 1)
    fields = [(words >> shift).bitwise_and_(mask) for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=2).view(torch.uint8).flatten(1)  # [groups, rows, fields, row]


def half(two_bytes: Tensor) -> Tensor:
    return two_bytes.view(torch.float16).float()  # [groups, 1]


def _q2_k(groups: Tensor) -> Parts:
    scales, offsets = groups[:, :16] & 15, groups[:, :16] >> 4
    codes = unpack(groups[:, 16:80], 2, row=32)
    return Parts(codes, 0, half(groups[:, 80:82]) * scales, -half(groups[:, 82:]) * offsets)


def _q3_k(groups: Tensor) -> Parts:
    codes = unpack(groups[:, 32:96], 2, row=32)
    codes |= unpack(groups[:, :32], 1, row=32).bitwise_left_shift_(2)
    scales = unpack(groups[:, 96:104], 4, row=8) | unpack(groups[:, 104:108], 2, row=4) << 4  # [groups, 16]
    return Parts(codes, 4, half(groups[:, 108:]) * (scales.view(torch.int8) - 32), None)


def _scales_and_offsets(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K's and Q5_K's 12 bytes, as three rows of four.

    The low 6 bits of the first row are scales 0..3, of the second offsets 0..3. Scales 4..7 are the low halves of the third
    row and offsets 4..7 its high halves, both topped by the 2 bits that are left in the row of their kind.
    """
    first, second, third = packed.split(4, dim=-1)  # [groups, 4] each
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)  # [groups, 8]
    offsets = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return scales, offsets


def _q45_k(groups: Tensor, codes: Tensor) -> Parts:
    scales, offsets = _scales_and_offsets(groups[:, 4:16])
    return Parts(codes, 0, half(groups[:, :2]) * scales, -half(groups[:, 2:4]) * offsets)


def _q4_k(groups: Tensor) -> Parts:
    return _q45_k(groups, unpack(groups[:, 16:], 4, row=32))


def _q5_k(groups: Tensor) -> Parts:
    codes = unpack(groups[:, 48:], 4, row=32)
    codes |= unpack(groups[:, 16:48], 1, row=32).bitwise_left_shift_(4)
    return _q45_k(groups, codes)


def _q6_k(groups: Tensor) -> Parts:
    codes = unpack(groups[:, :128], 4, row=64)
    codes |= unpack(groups[:, 128:192], 2, row=32).bitwise_left_shift_(4)
    return Parts(codes, 32, half(groups[:, 208:]) * groups[:, 192:208].view(torch.int8), None)


K_KINDS = {"Q2_K": (84, _q2_k), "Q3_K": (110, _q3_k), "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k)}
