"""The norm between two sub-layers, which also adds to the residual stream."""

import torch
from torch import Tensor, nn

from octavo.kernels.ops import add_rms_norm
from octavo.quant.base import empty_parameter


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds x, the result of the last sub-layer, to the residual stream. Returns the normed sum and the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)
