"""Keys and values in 8 bits: codes from -127 to 127, and one float32 scale for each head of a token.

    head    [ 0.5 -2.0  0.1  0.0 ]  ->  codes [ 32 -127  6  0 ],  scale 2.0 / 127

The native kernels store by the same rule, so that equal numbers get equal bits. What is not finite shows in the scale.
"""

import torch
from torch import Tensor


def to_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [T, kv_heads, head_dim] -> codes of that shape, scale [T, kv_heads]"""
    wide = values.float()
    largest = wide.abs().amax(-1)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)  # 127 / largest would be a rounded reciprocal, times 127
    codes = (wide * inverse.unsqueeze(-1)).round_().nan_to_num_(0, 0, 0)
    return codes.to(torch.int8), largest / 127


def from_codes(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float().mul_(scale.unsqueeze(-1))
