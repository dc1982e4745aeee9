"""GGML's groups of quantised numbers, back to float32. Here the kinds in groups of 32; the K kinds are in `dequant_k`.

    Q4_0: 18 bytes    scale f16 | 16 code pairs                          x = scale * (code - 8)
    Q4_1: 20 bytes    scale f16 | offset f16 | 16 code pairs             x = scale * code + offset
    Q5_0: 22 bytes    scale f16 | 32 top bits | 16 code pairs            x = scale * (code - 16)
    Q5_1: 24 bytes    scale f16 | offset f16 | 32 top bits | 16 pairs    x = scale * code + offset
    Q8_0: 34 bytes    scale f16 | 32 codes i8                            x = scale * code

The low halves of the 16 bytes of pairs are numbers 0..15, the high halves 16..31; the top bits are in the order of the
numbers, the lowest bit of a byte first. F32, F16 and BF16 are numbers as they stand.

A scale has 11 significant bits and a code at most 8, so their product is exact in float32 and the result has the same bits
wherever it is computed, with a fused multiply-add or without.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.reference.dequant_k import K_KINDS, Parts, half

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _pairs(groups: Tensor) -> Tensor:
    """The codes in the last 16 bytes of each group."""
    low, high = groups & 15, groups >> 4  # of the scales too: a pass over contiguous bytes is faster than one that skips some
    return torch.cat([low[:, -16:], high[:, -16:]], dim=-1)  # [groups, 32]


def _pairs_and_top_bits(groups: Tensor) -> Tensor:
    """Codes of 5 bits: 4 in the last 16 bytes of each group, the top one in the 4 bytes before them."""
    spread = (torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1).to(torch.uint8) << 4  # [256, 8]: by byte, its 8 bits, each as a 16
    spread = spread.view(torch.int64).squeeze(-1)  # [256]: 8 codes are looked up at once
    top = spread[groups[:, -20:-16].int()].view(torch.uint8)  # [groups, 32]
    return top.bitwise_or_(_pairs(groups))


def _q4_0(groups: Tensor) -> Parts:
    return Parts(_pairs(groups), 8, half(groups[:, :2]), None)


def _q4_1(groups: Tensor) -> Parts:
    return Parts(_pairs(groups), 0, half(groups[:, :2]), half(groups[:, 2:4]))


def _q5_0(groups: Tensor) -> Parts:
    return Parts(_pairs_and_top_bits(groups), 16, half(groups[:, :2]), None)


def _q5_1(groups: Tensor) -> Parts:
    return Parts(_pairs_and_top_bits(groups), 0, half(groups[:, :2]), half(groups[:, 2:4]))


def _q8_0(groups: Tensor) -> Parts:
    return Parts(groups[:, 2:] ^ 128, 128, half(groups[:, :2]), None)  # signed codes, from 128 on


# By kind: bytes a group, and groups [groups, bytes] to their parts
QUANTISED: dict[str, tuple[int, Callable[[Tensor], Parts]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1), "Q8_0": (34, _q8_0), **K_KINDS,
}  # fmt: skip
SUPPORTED_KINDS = (*DENSE, *QUANTISED)


def take_apart(raw: Tensor, kind: str) -> Parts:
    """The parts of the quantised numbers that the bytes `raw` (uint8, contiguous) hold as `kind`."""
    group_bytes, parts = QUANTISED[kind]
    return parts(raw.view(-1, group_bytes))


def dequantize(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The float32 tensor of `shape` that the bytes `raw` (uint8, contiguous) hold as `kind`."""
    if kind in DENSE:
        return raw.view(DENSE[kind]).float().view(shape)
    codes, middle, scale, offset = take_apart(raw, kind)
    signed = codes.view(torch.int8).sub_(middle) if middle else codes  # 8 bits wrap around to what they were
    out = signed.float().view(*scale.shape, -1).mul_(scale.unsqueeze(-1))  # [groups, runs, run]
    if offset is not None:
        out.add_(offset.unsqueeze(-1))
    return out.view(shape)
