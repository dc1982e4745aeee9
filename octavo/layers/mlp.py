"""The part of a layer in which each token is computed alone: an MLP, or a mixture of experts (MoE).

    MLP        gate and up in one product, or up alone; down
    Mixture    a router sends each token through a few of many MLPs

    router            logits of all experts
    experts.gate_up   gate and up of every expert, one below the other: a merged matrix like any other, which may be quantised
    experts.down
    shared            one more MLP that every token passes through; `shared_gate` computes its weight, if there is one
    expert_bias       added to the scores of experts when they are selected, if the model has one

Ranks have either a part of every expert, or some whole experts each. In both cases the results are summed once per layer.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.comm.comm import Comm
from octavo.kernels.gates import Activation, Gate
from octavo.kernels.ops import (
    add_weighted,
    choose_experts,
    choose_in_groups,
    gate_and_mul,
    gelu,
    invariant_mixture,
    mixture,
    shared_mixture,
)
from octavo.layers.linear import Linear, MergedLinear, RowParallelLinear
from octavo.quant.schemes import Packed, QuantScheme, Unquantized, empty_parameter


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or with GELU instead of silu. Gate and up are one product. Without a gate: down(gelu(up(x)))."""

    def __init__(
        self, hidden_size: int, size: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype, comm: Comm,
        activation: Activation = "swiglu",
    ) -> None:  # fmt: skip
        super().__init__()
        assert activation != "clamped", f"no MLP of kind {activation}"
        self.gate = None if activation == "gelu" else activation
        parts = {"up": size} if activation == "gelu" else {"gate": size, "up": size}
        self.gate_up = MergedLinear(hidden_size, parts, bias, scheme, dtype)
        self.down = RowParallelLinear(size, hidden_size, bias, scheme, dtype, comm)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self._activated(x))
        return out

    def of_rank(self, x: Tensor) -> Tensor:
        """Like `RowParallelLinear.of_rank`."""
        return self.down.of_rank(self._activated(x))

    def _activated(self, x: Tensor) -> Tensor:
        if self.gate == "swiglu":
            return self.gate_up.scheme.gated(self.gate_up, x)
        return gelu(self.gate_up(x)) if self.gate is None else gate_and_mul(self.gate_up(x), self.gate)


@dataclass(frozen=True, slots=True)
class Routing:
    count: int  # of all experts
    chosen: int  # per token
    scores: str  # "all" or "chosen": the logits in the softmax; or "sigmoid"
    normed: bool  # the weights of the chosen experts are normalised to a sum of 1
    held: int  # on this rank: all, or the same number on each rank
    in_groups: tuple[int, int] | None = None  # groups of experts, and how many of them are chosen; None: the best experts of all are
    biased: bool = False
    scale: float = 1.0


class ExpertStack(nn.Module):
    """The matrices of this rank's experts."""

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
    """Computes a partial sum if ranks share it."""

    def __init__(self, hidden_size: int, inner: int, scheme: QuantScheme, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = MergedLinear(hidden_size, {"gate": inner, "up": inner}, False, scheme, dtype)
        self.down = Linear(inner, hidden_size, False, scheme, dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate_up.scheme.gated(self.gate_up, x))
        return out


class Mixture(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        inner: int,
        shared_inner: int,
        routing: Routing,
        activation: Gate,
        bias: bool,
        scheme: QuantScheme,
        dtype: torch.dtype,
        comm: Comm,
        shared_gated: bool = True,
    ) -> None:
        """`inner`: of an expert; `shared_inner`: of the shared expert, 0 if there is none; `bias`: of router and experts"""
        super().__init__()
        self.routing, self.activation, self.comm = routing, activation, comm
        self.first = routing.held * comm.rank if routing.held < routing.count else 0  # the first expert on this rank
        self.router = Linear(hidden_size, routing.count, bias, scheme, dtype)
        self.experts = ExpertStack(hidden_size, inner, routing.held, bias, scheme, dtype)
        self.expert_bias = empty_parameter(routing.count, dtype=torch.float32) if routing.biased else None
        self.shared: SharedExpert | None = None
        self.shared_gate: Linear | None = None
        if shared_inner:
            self.shared = SharedExpert(hidden_size, shared_inner, scheme, dtype)
            self.shared_gate = Linear(hidden_size, 1, False, scheme, dtype) if shared_gated else None

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, self.router(x))

    def mix(self, x: Tensor, logits: Tensor, few: bool = False) -> Tensor:
        """Like `forward`, for given logits of all experts [T, count]. `few`: whether the rows are a small batch"""
        ids, weights = self._choose(logits)
        stacks = matrix(self.experts.gate_up), matrix(self.experts.down)
        if few and self._shared_in_floats():
            shared, gate = cast(SharedExpert, self.shared), None if self.shared_gate is None else matrix(self.shared_gate)
            out = shared_mixture(x, ids, weights, *stacks, matrix(shared.gate_up), matrix(shared.down), gate, self.first)
            return self.comm.all_reduce(out)
        compute = invariant_mixture if self.experts.gate_up.scheme.invariant else mixture
        out = compute(x, ids, weights, *stacks, self.experts.biases, self.activation, self.first)
        if self.shared is not None:
            out = self._with_shared(out, self.shared(x), x)
        return self.comm.all_reduce(out)

    def _shared_in_floats(self) -> bool:
        """Whether there is a shared expert, and nothing is quantised or biased."""
        if self.shared is None or self.experts.biases is not None or self.activation != "swiglu":
            return False
        used = [self.experts.gate_up, self.experts.down, self.shared.gate_up, self.shared.down, self.shared_gate]
        return all(one is None or isinstance(one.scheme, Unquantized) for one in used)

    def _with_shared(self, out: Tensor, shared: Tensor, x: Tensor) -> Tensor:
        gate = self.shared_gate
        if gate is None:
            return out + shared
        if isinstance(gate.scheme, Unquantized) and not gate.scheme.invariant:
            return add_weighted(out, shared, x, cast(Tensor, gate.weight))
        weight: Tensor = gate(x)
        return out + torch.sigmoid(weight) * shared

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.routing
        if routing.in_groups is None:
            return choose_experts(logits, routing.chosen, routing.scores, routing.normed)
        groups = routing.in_groups
        return choose_in_groups(logits, routing.chosen, routing.scores, routing.normed, *groups, self.expert_bias, routing.scale)


def matrix(linear: Linear) -> Any:
    """Returns the weights in the format of its scheme: a tensor or packed codes."""
    return linear.codes if isinstance(linear.scheme, Packed) else linear.weight
