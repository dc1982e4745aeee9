"""GGML's IQ kinds of 1 to 3 bits: a code is the index of 4 or 8 numbers in a grid, and most kinds store signs separately.

    IQ2_XXS:  66 bytes    d f16 | 8 x (4 places u8, word)                                            runs of 32
    IQ2_XS:   74 bytes    d f16 | 32 x (place 9 bits, signs 7 bits) | 16 scales of 4 bits            runs of 16
    IQ2_S:    82 bytes    d f16 | 32 places u8 | 32 x 8 signs | 32 x 2 top bits | 16 scales          runs of 16
    IQ3_XXS:  98 bytes    d f16 | 64 places u8 | 8 words                                             runs of 32
    IQ3_S:   110 bytes    d f16 | 64 places u8 | 64 top bits | 32 x 8 signs | 8 scales of 4 bits     runs of 32
    IQ1_S:    50 bytes    d f16 | 32 places u8 | 8 x (4 x 3 top bits, scale 3 bits, shift)           runs of 32
    IQ1_M:    56 bytes    32 places u8 | 32 x (3 top bits, shift) | 4 x (4 scales of 3 bits, a quarter of d)    runs of 16

    word: 4 x 7 signs, scale 4 bits. Of 8 signs in 7 bits the last one makes their number even.
    IQ2:  x = d * (scale + 1/2) / 4 * number      IQ3_XXS: x = d * (scale + 1/2) / 2 * number      IQ3_S: x = d * (2 scale + 1) * number
    IQ1:  x = d * (2 scale + 1) * (number ± 1/8)

All of them are converted to 8-bit codes here, shifted by 128. Products are exact in float32.
"""

import torch
from torch import Tensor

from octavo.kernels.reference.gguf_grids import even_sign_masks, grid, sign_masks
from octavo.kernels.reference.gguf_parts import Parts, half

MIDDLE = 128


def _looked_up(name: str, places: Tensor) -> Tensor:
    """Returns the numbers at these indices of a grid: [groups, places] -> uint8 [groups, 256]."""
    return grid(name)[places].view(torch.uint8)


def _with_signs(numbers: Tensor, masks: Tensor) -> Tensor:
    """Returns codes. `masks`: int64 [groups, 32], a byte for each number, 255 if it is negative."""
    negative = masks.view(torch.uint8)
    return (numbers ^ negative).sub_(negative).add_(MIDDLE)  # 8 bits wrap around


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


def iq2_xxs(groups: Tensor) -> Parts:
    words = _words(groups[:, 2:]).view(-1, 8, 2)
    places = words[..., 0].contiguous().view(torch.uint8).int()  # [groups, 32]
    masks, scales = _signs_and_scales(words[..., 1])
    return Parts(_with_signs(_looked_up("IQ2_XXS", places), masks), MIDDLE, half(groups[:, :2]) * (scales + 0.5) * 0.25)


def iq2_xs(groups: Tensor) -> Parts:
    both = _shorts(groups[:, 2:66])
    codes = _with_signs(_looked_up("IQ2_XS", both & 511), even_sign_masks()[both >> 9])
    return Parts(codes, MIDDLE, half(groups[:, :2]) * (_fields(groups[:, 66:], 4, 2) + 0.5) * 0.25)


def iq2_s(groups: Tensor) -> Parts:
    places = groups[:, 2:34].int() | _fields(groups[:, 66:74], 2, 4).int() << 8
    codes = _with_signs(_looked_up("IQ2_S", places), sign_masks()[groups[:, 34:66].int()])
    return Parts(codes, MIDDLE, half(groups[:, :2]) * (_fields(groups[:, 74:], 4, 2) + 0.5) * 0.25)


def iq3_xxs(groups: Tensor) -> Parts:
    masks, scales = _signs_and_scales(_words(groups[:, 66:]))
    codes = _with_signs(_looked_up("IQ3_XXS", groups[:, 2:66].int()), masks)
    return Parts(codes, MIDDLE, half(groups[:, :2]) * (scales + 0.5) * 0.5)


def iq3_s(groups: Tensor) -> Parts:
    places = groups[:, 2:66].int() | _fields(groups[:, 66:74], 1, 8).int() << 8
    codes = _with_signs(_looked_up("IQ3_S", places), sign_masks()[groups[:, 74:106].int()])
    return Parts(codes, MIDDLE, half(groups[:, :2]) * (_fields(groups[:, 106:], 4, 2) * 2 + 1))


def _shifted(places: Tensor, down: Tensor) -> Tensor:
    """Returns codes in eighths, one more than the numbers of the grid, or one less where `down` is 1: [groups, 32]."""
    shifts = (1 - 2 * down.int()).to(torch.uint8)
    return _looked_up("IQ1", places).view(-1, 32, 8).add_(shifts.unsqueeze(-1)).flatten(1)


def iq1_s(groups: Tensor) -> Parts:
    tops = _shorts(groups[:, 34:])  # [groups, 8]
    places = groups[:, 2:34].int() | _fields(tops, 3, 4) << 8
    codes = _shifted(places, (tops >> 15).repeat_interleave(4, dim=1))
    return Parts(codes, MIDDLE, half(groups[:, :2]) * ((tops >> 12 & 7) * 2 + 1) * 0.125)


def iq1_m(groups: Tensor) -> Parts:
    scales = _shorts(groups[:, 48:])  # [groups, 4]
    quarters = (scales >> 12) << torch.arange(0, 16, 4, dtype=torch.int32)
    d = half(quarters.sum(dim=1, keepdim=True).to(torch.uint16).view(torch.uint8))
    tops = _fields(groups[:, 32:48], 4, 2)  # [groups, 32]
    codes = _shifted(groups[:, :32].int() | (tops & 7).int() << 8, tops >> 3)
    return Parts(codes, MIDDLE, d * (_fields(scales, 3, 4) * 2 + 1) * 0.125)
