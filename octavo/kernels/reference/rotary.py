"""Rotary positions: dimension i and dimension i + head_dim/2 of a head are one point, turned by an angle.

    head   [ x0 x1 x2 x3 | y0 y1 y2 y3 ]        (xi, yi) -> (xi cos - yi sin, yi cos + xi sin)
"""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim]; cos and sin [T, head_dim / 2] float32, already those of each token's position."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
