"""4-bit codes that are indices of 16 unevenly spaced numbers: IQ4_NL, IQ4_XS and MXFP4.

    IQ4_NL:  18 bytes    d f16 | 16 code pairs                                             x = d * number[code]
    IQ4_XS: 136 bytes    d f16 | 8 scales of 6 bits: top 2 bits, low 4 | 8 x 16 pairs      x = d * (scale - 32) * number[code]
    MXFP4:   17 bytes    exponent u8 | 16 code pairs                                       x = 2^(exponent - 128) * number[code]

The numbers of MXFP4 are 4-bit floats, doubled so that they are integers. Tables are shifted by a middle, a power of two, so that they
have no negative numbers.
"""

from functools import cache

import torch
from torch import Tensor

from octavo.kernels.reference.gguf_parts import Parts, half, pairs, unpack

_IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the floats
IQ4_MIDDLE, FP4_MIDDLE = 128, 16
IQ4_TABLE = torch.tensor([IQ4_MIDDLE + number for number in _IQ4_NUMBERS], dtype=torch.uint8)
FP4_TABLE = torch.tensor([FP4_MIDDLE + number for number in _FP4_NUMBERS], dtype=torch.uint8)


def iq4_nl(groups: Tensor) -> Parts:
    return Parts(pairs(groups), IQ4_MIDDLE, half(groups[:, :2]), table=IQ4_TABLE)


def iq4_xs(groups: Tensor) -> Parts:
    low = torch.stack([groups[:, 4:8] & 15, groups[:, 4:8] >> 4], dim=-1).flatten(1)  # [groups, 8]
    top = (groups[:, 2:4].unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(1)
    scales = (low | top << 4).view(torch.int8) - 32
    return Parts(unpack(groups[:, 8:], 4, row=16), IQ4_MIDDLE, half(groups[:, :2]) * scales, table=IQ4_TABLE)


def mxfp4(groups: Tensor) -> Parts:
    return Parts(pairs(groups), FP4_MIDDLE, _halved_powers()[groups[:, :1].int()], table=FP4_TABLE)


@cache
def _halved_powers() -> Tensor:
    """Returns 2^(exponent - 128) by byte: half of the encoded scale, because the table holds doubled numbers."""
    return torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)])
