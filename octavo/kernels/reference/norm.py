"""RMS normalisation: x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

The mean is taken in float32 whatever x is, and x is rounded back to its own dtype before the weight multiplies it:
the order in which the published models were trained.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream and normalises the sum: (normed, new residual)."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
