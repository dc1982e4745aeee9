"""A mixture of experts: a router sends each token through a few of many MLPs.

    router            logits of all experts
    experts.gate_up   gate and up of every expert, one below the other: a merged matrix like any other, which may be codes
    experts.down
    shared            one more MLP that every token goes through; `shared_gate` says how much of it counts

Ranks either have a part of every expert, or some whole experts each. Both ways they sum what they give, once for the layer.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.kernels.ops import choose_experts, mixture
from octavo.layers.comm import Comm
from octavo.layers.linear import Linear, MergedLinear
from octavo.policy.description import MLPShape
from octavo.quant.schemes import Packed, QuantScheme


class ExpertStack(nn.Module):
    """The matrices of the experts that this rank has."""

    def __init__(self, hidden_size: int, inner: int, count: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype) -> None:
        super().__init__()
        halves = {f"{expert}.{part}": inner for expert in range(count) for part in ("gate", "up")}
        self.gate_up = MergedLinear(hidden_size, halves, bias, scheme, dtype)
        self.down = MergedLinear(inner, {str(expert): hidden_size for expert in range(count)}, bias, scheme, dtype)

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        bias = cast(Tensor | None, self.gate_up.bias)
        return None if bias is None else (bias, cast(Tensor, self.down.bias))


class SharedExpert(nn.Module):
    """Gives a part of a sum over ranks, where they share it."""

    def __init__(self, hidden_size: int, inner: int, scheme: QuantScheme, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = MergedLinear(hidden_size, {"gate": inner, "up": inner}, False, scheme, dtype)
        self.down = Linear(inner, hidden_size, False, scheme, dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate_up.scheme.gated(self.gate_up, x))
        return out


class Mixture(nn.Module):
    def __init__(
        self, hidden_size: int, shape: MLPShape, bias: bool, scheme: QuantScheme, dtype: torch.dtype, comm: Comm
    ) -> None:
        """`bias`: whether router and experts have biases"""
        super().__init__()
        assert shape.experts is not None
        self.shape, self.chosen, self.comm = shape, shape.experts, comm
        held = shape.experts.held
        self.first = held * comm.rank if shape.experts.ranks > 1 else 0  # of the experts that this rank has
        self.router = Linear(hidden_size, shape.experts.count, bias, scheme, dtype)
        self.experts = ExpertStack(hidden_size, shape.inner, held, bias, scheme, dtype)
        self.shared: SharedExpert | None = None
        if shape.experts.shared_inner:
            self.shared = SharedExpert(hidden_size, shape.experts.shared_inner, scheme, dtype)
            self.shared_gate = Linear(hidden_size, 1, False, scheme, dtype)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = choose_experts(self.router(x), self.chosen.chosen, self.chosen.scores, self.chosen.normed)
        stacks = matrix(self.experts.gate_up), matrix(self.experts.down)
        out = mixture(x, ids, weights, *stacks, self.experts.biases, self.shape.activation, self.first)
        if self.shared is not None:
            out = out + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return self.comm.all_reduce(out)


def matrix(linear: Linear) -> Any:
    """Returns the weights as its scheme keeps them: a tensor or codes."""
    return linear.codes if isinstance(linear.scheme, Packed) else linear.weight
