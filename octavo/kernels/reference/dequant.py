"""Dequantises GGML's groups of numbers to float32. These are the kinds with groups of 32; the others are drawn below.

    Q4_0: 18 bytes    scale f16 | 16 code pairs                          x = scale * (code - 8)
    Q4_1: 20 bytes    scale f16 | offset f16 | 16 code pairs             x = scale * code + offset
    Q5_0: 22 bytes    scale f16 | 32 top bits | 16 code pairs            x = scale * (code - 16)
    Q5_1: 24 bytes    scale f16 | offset f16 | 32 top bits | 16 pairs    x = scale * code + offset
    Q8_0: 34 bytes    scale f16 | 32 codes i8                            x = scale * code

The low halves of the 16 bytes of pairs are numbers 0..15, the high halves 16..31; the top bits are in the order of the
numbers, the lowest bit of a byte first. F32, F16 and BF16 are not quantised.

A scale has 11 significant bits and a code at most 8, so their product is exact in float32 and the result has the same bits
on every device, with or without a fused multiply-add.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.reference.gguf_grids import even_sign_masks, grid, sign_masks

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the floats
IQ4_MIDDLE, FP4_MIDDLE = 128, 16
IQ4_TABLE = torch.tensor([IQ4_MIDDLE + number for number in _IQ4_NUMBERS], dtype=torch.uint8)
FP4_TABLE = torch.tensor([FP4_MIDDLE + number for number in _FP4_NUMBERS], dtype=torch.uint8)
IQ_MIDDLE = 128


# -- common parts of all quantised kinds


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


# -- kinds in groups of 32


def _pairs_and_top_bits(groups: Tensor) -> Tensor:
    """Returns 5-bit codes: 4 bits are in the last 16 bytes of each group, the top bit is in the 4 bytes before them."""
    spread = (torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1).to(torch.uint8) << 4  # [256, 8]: the bits of each byte, as 0 or 16
    spread = spread.view(torch.int64).squeeze(-1)  # [256]: 8 codes are looked up at once
    top = spread[groups[:, -20:-16].int()].view(torch.uint8)  # [groups, 32]
    return top.bitwise_or_(pairs(groups))


def _q4_0(groups: Tensor) -> Parts:
    return Parts(pairs(groups), 8, half(groups[:, :2]), None)


def _q4_1(groups: Tensor) -> Parts:
    return Parts(pairs(groups), 0, half(groups[:, :2]), half(groups[:, 2:4]))


def _q5_0(groups: Tensor) -> Parts:
    return Parts(_pairs_and_top_bits(groups), 16, half(groups[:, :2]), None)


def _q5_1(groups: Tensor) -> Parts:
    return Parts(_pairs_and_top_bits(groups), 0, half(groups[:, :2]), half(groups[:, 2:4]))


def _q8_0(groups: Tensor) -> Parts:
    return Parts(groups[:, 2:] ^ 128, 128, half(groups[:, :2]), None)  # signed codes, shifted by 128


# -- K kinds: groups of 256 numbers in 8 or 16 runs, each run with its own small integer scale
#
#     Q2_K:  84 bytes    16 x (scale 4 bits, offset 4 bits) | codes 64 | d f16 | m f16
#     Q3_K: 110 bytes    top bits of codes 32 | codes 64 | 16 scales of 6 bits 12 | d f16
#     Q4_K: 144 bytes    d f16 | m f16 | 8 scales and 8 offsets of 6 bits 12 | codes 128
#     Q5_K: 176 bytes    d f16 | m f16 | 8 scales and 8 offsets of 6 bits 12 | top bits of codes 32 | codes 128
#     Q6_K: 210 bytes    codes 128 | top bits of codes 64 | 16 scales i8 | d f16
#
#     Q2_K, Q4_K, Q5_K:  x = (d * scale) * code - (m * offset)        Q3_K, Q6_K:  x = (d * scale) * (code - middle)
#
# A byte holds the codes of numbers that are 32 (in Q6_K: 64) apart: the lowest bits of a row of bytes are one run of numbers, the
# next bits the next run. d, scale and code have at most 11 + 7 + 5 significant bits, so every product is exact in float32.


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
    """Returns the scales and offsets in 12 bytes of Q4_K or Q5_K, which are three rows of four.

    The low 6 bits of the first row are scales 0..3, of the second offsets 0..3. Scales 4..7 are the low halves of the third
    row and offsets 4..7 its high halves. The upper 2 bits of both are the remaining bits of the first or second row.
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


# -- ternary kinds: groups of 256 numbers of -1, 0 and 1 with one scale
#
#     TQ1_0: 54 bytes    48 + 4 bytes of five (the last four: of four) numbers each, to the base of 3 | d f16
#     TQ2_0: 66 bytes    codes of 2 bits 64 | d f16
#
# A byte of TQ1_0 is a fraction of 256: multiplied by 3, the part above 256 is its first number, and the rest holds the others.


def _tq1_0(groups: Tensor) -> Parts:
    rows = [(groups[:, :32], 5), (groups[:, 32:48], 5), (groups[:, 48:52], 4)]
    fractions = [packed * 3**place for packed, count in rows for place in range(count)]  # 8 bits wrap around
    codes = (torch.cat(fractions, dim=-1).short() * 3 >> 8).to(torch.uint8)
    return Parts(codes, 1, half(groups[:, 52:]))


def _tq2_0(groups: Tensor) -> Parts:
    return Parts(unpack(groups[:, :64], 2, row=32), 1, half(groups[:, 64:]))


# -- 4-bit codes that are indices of 16 unevenly spaced numbers
#
#     IQ4_NL:  18 bytes    d f16 | 16 code pairs                                             x = d * number[code]
#     IQ4_XS: 136 bytes    d f16 | 8 scales of 6 bits: top 2 bits, low 4 | 8 x 16 pairs      x = d * (scale - 32) * number[code]
#     MXFP4:   17 bytes    exponent u8 | 16 code pairs                                       x = 2^(exponent - 128) * number[code]
#
# The numbers of MXFP4 are 4-bit floats, doubled so that they are integers. Tables are shifted by a middle, a power of two, so that
# they have no negative numbers.


def _iq4_nl(groups: Tensor) -> Parts:
    return Parts(pairs(groups), IQ4_MIDDLE, half(groups[:, :2]), table=IQ4_TABLE)


def _iq4_xs(groups: Tensor) -> Parts:
    low = torch.stack([groups[:, 4:8] & 15, groups[:, 4:8] >> 4], dim=-1).flatten(1)  # [groups, 8]
    top = (groups[:, 2:4].unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(1)
    scales = (low | top << 4).view(torch.int8) - 32
    return Parts(unpack(groups[:, 8:], 4, row=16), IQ4_MIDDLE, half(groups[:, :2]) * scales, table=IQ4_TABLE)


def _mxfp4(groups: Tensor) -> Parts:
    return Parts(pairs(groups), FP4_MIDDLE, _halved_powers()[groups[:, :1].int()], table=FP4_TABLE)


@cache
def _halved_powers() -> Tensor:
    """Returns 2^(exponent - 128) by byte: half of the encoded scale, because the table holds doubled numbers."""
    return torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)])


# -- GGML's IQ kinds of 1 to 3 bits: a code is the index of 4 or 8 numbers in a grid, and most kinds store signs separately
#
#     IQ2_XXS:  66 bytes    d f16 | 8 x (4 places u8, word)                                            runs of 32
#     IQ2_XS:   74 bytes    d f16 | 32 x (place 9 bits, signs 7 bits) | 16 scales of 4 bits            runs of 16
#     IQ2_S:    82 bytes    d f16 | 32 places u8 | 32 x 8 signs | 32 x 2 top bits | 16 scales          runs of 16
#     IQ3_XXS:  98 bytes    d f16 | 64 places u8 | 8 words                                             runs of 32
#     IQ3_S:   110 bytes    d f16 | 64 places u8 | 64 top bits | 32 x 8 signs | 8 scales of 4 bits     runs of 32
#     IQ1_S:    50 bytes    d f16 | 32 places u8 | 8 x (4 x 3 top bits, scale 3 bits, shift)           runs of 32
#     IQ1_M:    56 bytes    32 places u8 | 32 x (3 top bits, shift) | 4 x (4 scales of 3 bits, a quarter of d)    runs of 16
#
#     word: 4 x 7 signs, scale 4 bits. Of 8 signs in 7 bits the last one makes their number even.
#     IQ2:  x = d * (scale + 1/2) / 4 * number      IQ3_XXS: x = d * (scale + 1/2) / 2 * number      IQ3_S: x = d * (2 scale + 1) * number
#     IQ1:  x = d * (2 scale + 1) * (number ± 1/8)
#
# All of them are converted to 8-bit codes, shifted by 128. Products are exact in float32.


def _looked_up(name: str, places: Tensor) -> Tensor:
    """Returns the numbers at these indices of a grid: [groups, places] -> uint8 [groups, 256]."""
    return grid(name)[places].view(torch.uint8)


def _with_signs(numbers: Tensor, masks: Tensor) -> Tensor:
    """Returns codes. `masks`: int64 [groups, 32], a byte for each number, 255 if it is negative."""
    negative = masks.view(torch.uint8)
    return (numbers ^ negative).sub_(negative).add_(IQ_MIDDLE)  # 8 bits wrap around


def _fields(packed: Tensor, bits: int, count: int) -> Tensor:
    """Returns `count` fields of each number, the lowest bits first: [groups, n] -> [groups, n * count]."""
    shifts = torch.arange(0, bits * count, bits, dtype=packed.dtype)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _shorts(octets: Tensor) -> Tensor:
    """Returns unsigned 16-bit numbers as int32."""
    return octets.clone(memory_format=torch.contiguous_format).view(torch.int16).int() & 0xFFFF


def _words(octets: Tensor) -> Tensor:
    """Returns int32 words of a copy, since a view of one block may not be aligned."""
    return octets.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _signs_and_scales(words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns masks [groups, 32] and scales [groups, 8] from int32 words [groups, 8]."""
    return even_sign_masks()[_fields(words, 7, 4)], words >> 28 & 15


def _iq2_xxs(groups: Tensor) -> Parts:
    words = _words(groups[:, 2:]).view(-1, 8, 2)
    places = words[..., 0].contiguous().view(torch.uint8).int()  # [groups, 32]
    masks, scales = _signs_and_scales(words[..., 1])
    return Parts(_with_signs(_looked_up("IQ2_XXS", places), masks), IQ_MIDDLE, half(groups[:, :2]) * (scales + 0.5) * 0.25)


def _iq2_xs(groups: Tensor) -> Parts:
    both = _shorts(groups[:, 2:66])
    codes = _with_signs(_looked_up("IQ2_XS", both & 511), even_sign_masks()[both >> 9])
    return Parts(codes, IQ_MIDDLE, half(groups[:, :2]) * (_fields(groups[:, 66:], 4, 2) + 0.5) * 0.25)


def _iq2_s(groups: Tensor) -> Parts:
    places = groups[:, 2:34].int() | _fields(groups[:, 66:74], 2, 4).int() << 8
    codes = _with_signs(_looked_up("IQ2_S", places), sign_masks()[groups[:, 34:66].int()])
    return Parts(codes, IQ_MIDDLE, half(groups[:, :2]) * (_fields(groups[:, 74:], 4, 2) + 0.5) * 0.25)


def _iq3_xxs(groups: Tensor) -> Parts:
    masks, scales = _signs_and_scales(_words(groups[:, 66:]))
    codes = _with_signs(_looked_up("IQ3_XXS", groups[:, 2:66].int()), masks)
    return Parts(codes, IQ_MIDDLE, half(groups[:, :2]) * (scales + 0.5) * 0.5)


def _iq3_s(groups: Tensor) -> Parts:
    places = groups[:, 2:66].int() | _fields(groups[:, 66:74], 1, 8).int() << 8
    codes = _with_signs(_looked_up("IQ3_S", places), sign_masks()[groups[:, 74:106].int()])
    return Parts(codes, IQ_MIDDLE, half(groups[:, :2]) * (_fields(groups[:, 106:], 4, 2) * 2 + 1))


def _shifted(places: Tensor, down: Tensor) -> Tensor:
    """Returns codes in eighths, one more than the numbers of the grid, or one less where `down` is 1: [groups, 32]."""
    shifts = (1 - 2 * down.int()).to(torch.uint8)
    return _looked_up("IQ1", places).view(-1, 32, 8).add_(shifts.unsqueeze(-1)).flatten(1)


def _iq1_s(groups: Tensor) -> Parts:
    tops = _shorts(groups[:, 34:])  # [groups, 8]
    places = groups[:, 2:34].int() | _fields(tops, 3, 4) << 8
    codes = _shifted(places, (tops >> 15).repeat_interleave(4, dim=1))
    return Parts(codes, IQ_MIDDLE, half(groups[:, :2]) * ((tops >> 12 & 7) * 2 + 1) * 0.125)


def _iq1_m(groups: Tensor) -> Parts:
    scales = _shorts(groups[:, 48:])  # [groups, 4]
    quarters = (scales >> 12) << torch.arange(0, 16, 4, dtype=torch.int32)
    d = half(quarters.sum(dim=1, keepdim=True).to(torch.uint16).view(torch.uint8))
    tops = _fields(groups[:, 32:48], 4, 2)  # [groups, 32]
    codes = _shifted(groups[:, :32].int() | (tops & 7).int() << 8, tops >> 3)
    return Parts(codes, IQ_MIDDLE, d * (_fields(scales, 3, 4) * 2 + 1) * 0.125)


# -- all kinds

# Kind -> (bytes per group, function from groups [groups, bytes] to their parts)
QUANTISED: dict[str, tuple[int, Callable[[Tensor], Parts]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1), "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k), "Q3_K": (110, _q3_k), "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl), "IQ4_XS": (136, _iq4_xs), "MXFP4": (17, _mxfp4),
    "IQ1_S": (50, _iq1_s), "IQ1_M": (56, _iq1_m), "IQ2_XXS": (66, _iq2_xxs), "IQ2_XS": (74, _iq2_xs),
    "IQ2_S": (82, _iq2_s), "IQ3_XXS": (98, _iq3_xxs), "IQ3_S": (110, _iq3_s),
    "TQ1_0": (54, _tq1_0), "TQ2_0": (66, _tq2_0),
}  # fmt: skip
SUPPORTED_KINDS = (*DENSE, *QUANTISED)
_IN_GROUPS_OF_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")


def group_size(kind: str) -> int:
    """Returns the number of values in a group."""
    return 32 if kind in _IN_GROUPS_OF_32 else 256


def take_apart(raw: Tensor, kind: str) -> Parts:
    """Returns the parts of the quantised numbers that the bytes `raw` (uint8, contiguous) encode as `kind`."""
    group_bytes, parts = QUANTISED[kind]
    return parts(raw.view(-1, group_bytes))


def dequantize(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the float32 tensor of `shape` that the bytes `raw` (uint8, contiguous) encode as `kind`."""
    if kind in DENSE:
        return raw.view(DENSE[kind]).float().view(shape)
    codes, middle, scale, offset, table = take_apart(raw, kind)
    if table is not None:
        codes = table[codes.int()]
    signed = codes.view(torch.int8).sub_(middle) if middle else codes  # 8 bits wrap around to the signed value
    out = signed.float().view(*scale.shape, -1).mul_(scale.unsqueeze(-1))  # [groups, runs, run]
    if offset is not None:
        out.add_(offset.unsqueeze(-1))
    return out.view(shape)
