"""Dequantises GGML's groups of numbers to float32. These are the kinds with groups of 32; K and ternary kinds are drawn below.

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

import torch
from torch import Tensor

from octavo.kernels.reference import iq_kinds, table_kinds
from octavo.kernels.reference.gguf_parts import Parts, half, pairs, unpack

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


# -- all kinds

# Kind -> (bytes per group, function from groups [groups, bytes] to their parts)
QUANTISED: dict[str, tuple[int, Callable[[Tensor], Parts]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1), "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k), "Q3_K": (110, _q3_k), "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, table_kinds.iq4_nl), "IQ4_XS": (136, table_kinds.iq4_xs), "MXFP4": (17, table_kinds.mxfp4),
    "IQ1_S": (50, iq_kinds.iq1_s), "IQ1_M": (56, iq_kinds.iq1_m), "IQ2_XXS": (66, iq_kinds.iq2_xxs), "IQ2_XS": (74, iq_kinds.iq2_xs),
    "IQ2_S": (82, iq_kinds.iq2_s), "IQ3_XXS": (98, iq_kinds.iq3_xxs), "IQ3_S": (110, iq_kinds.iq3_s),
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
