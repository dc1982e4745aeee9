"""The SwiGLU MLP: down(silu(gate(x)) * up(x)), gate and up as one product."""

import torch
from torch import Tensor, nn

from octavo.layers.comm import Comm
from octavo.layers.linear import MergedLinear, RowParallelLinear
from octavo.quant.base import QuantScheme


class MLP(nn.Module):
    def __init__(self, hidden_size: int, size: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype, comm: Comm) -> None:
        super().__init__()
        self.gate_up = MergedLinear(hidden_size, {"gate": size, "up": size}, bias, scheme, dtype)
        self.down = RowParallelLinear(size, hidden_size, bias, scheme, dtype, comm)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate_up.scheme.gated(self.gate_up, x))
        return out
