"""The gate of a SwiGLU MLP."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * size], gate then up -> silu(gate) * up [T, size]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
