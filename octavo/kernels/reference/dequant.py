"""GGML's groups of quantised numbers, back to float32.

    Q8_0: 32 numbers in 34 bytes    scale f16 | 32 codes i8                  x = scale * code
    Q4_1: 32 numbers in 20 bytes    scale f16 | offset f16 | 16 code pairs   x = scale * code + offset
          the low halves of the 16 bytes are numbers 0..15, the high halves 16..31

F32, F16 and BF16 are numbers as they stand. A scale has 11 significant bits and a code at most 8, so their product is exact
in float32 and the result has the same bits wherever it is computed, with a fused multiply-add or without.
"""

from collections.abc import Callable

import torch
from torch import Tensor

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _q8_0(raw: Tensor) -> Tensor:
    groups = raw.view(-1, 34)  # [groups, 34]
    scale = groups[:, :2].view(torch.float16).float()  # [groups, 1]
    return groups[:, 2:].view(torch.int8).float().mul_(scale)


def _q4_1(raw: Tensor) -> Tensor:
    groups = raw.view(-1, 20)  # [groups, 20]
    scale, offset = groups[:, :4].view(torch.float16).float().unsqueeze(-1).unbind(1)  # [groups, 1] each
    low, high = groups & 15, groups >> 4  # of the scales too: a pass over contiguous bytes is faster than one that skips four in twenty
    out = torch.empty(groups.shape[0], 32)
    out[:, :16] = low[:, 4:]
    out[:, 16:] = high[:, 4:]
    return out.mul_(scale).add_(offset)


QUANTISED: dict[str, Callable[[Tensor], Tensor]] = {"Q4_1": _q4_1, "Q8_0": _q8_0}
SUPPORTED_KINDS = (*DENSE, *QUANTISED)


def dequantize(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The float32 tensor of `shape` that the bytes `raw` (uint8, contiguous) hold as `kind`."""
    if kind in DENSE:
        return raw.view(DENSE[kind]).float().view(shape)
    return QUANTISED[kind](raw).view(shape)
