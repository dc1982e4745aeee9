"""The norm between two sub-layers, which also carries the residual stream forward."""

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
        """x is what the last sub-layer adds to the stream; returns the next one's input and the new stream."""
        return add_rms_norm(x, residual, self.weight, self.eps)
