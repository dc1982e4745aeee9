"""Gated DeltaNet: a recurrent mixer, with its projections around the kernel that updates the states of sequences.

    in_proj.weight   [ q: k_heads * k_dim rows | k: the same | v: v_heads * v_dim | z: the same ]
    gates.weight     [ b: v_heads | a: v_heads ]: how much a token writes, and how much it forgets

    x -> in_proj -> q k v -> convolution, SiLU -> recurrence -> norm of each v head -> * silu(z) -> output

It is called as attention is: `mixer(x, cache, batch)`. `cache` has the states of its layer, and `batch.states` the slots of each row.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octavo.attention.delta_net import DeltaNetSpec
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.comm.comm import Comm
from octavo.kernels.ops import delta_net, gated_norm
from octavo.layers.linear import MergedLinear, RMSNorm, RowParallelLinear
from octavo.quant.schemes import QuantScheme, empty_parameter

Recurrence = Callable[..., Tensor]  # `delta_net` of `kernels/ops.py`, or a function with its arguments


class Convolution(nn.Module):
    """The weights of a convolution of each channel over the last tokens, the current one last."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(channels, 1, width, dtype=dtype)  # the shape of published files


class DeltaNet(nn.Module):
    def __init__(self, spec: DeltaNetSpec, hidden_size: int, scheme: QuantScheme, dtype: torch.dtype, comm: Comm) -> None:
        super().__init__()
        self.spec = spec
        self.in_proj = MergedLinear(hidden_size, {"qkv": spec.channels, "z": spec.v_size}, False, scheme, dtype)
        self.gates = MergedLinear(hidden_size, {"b": spec.v_heads, "a": spec.v_heads}, False, scheme, dtype)
        self.conv = Convolution(spec.channels, spec.conv_width, dtype)
        self.decay = empty_parameter(spec.v_heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(spec.v_heads, dtype=torch.float32)
        self.norm = RMSNorm(spec.v_dim, spec.norm_eps, dtype)
        self.recur: Recurrence = delta_net
        self.output = RowParallelLinear(spec.v_size, hidden_size, False, scheme, dtype, comm)

    def forward(self, x: Tensor, cache: Cache, batch: ForwardBatch) -> Tensor:
        """Returns the result of each token [T, v_heads * v_dim]. The caller applies `output`."""
        return self.mix(self.in_proj(x), self.gates(x), cache, batch)

    def mix(self, projected: Tensor, gates: Tensor, cache: Cache, batch: ForwardBatch) -> Tensor:
        """Like `forward`, for the results of `in_proj` and `gates`."""
        assert batch.states is not None, "a recurrent layer needs the slots of its states"
        qkv, z = projected.split([self.spec.channels, self.spec.v_size], dim=1)
        weights = self.conv.weight.squeeze(1), self.decay, self.dt_bias
        mixed = self.recur(qkv, gates, *weights, cache["conv"], cache["recurrent"], batch.query_start, batch.states)
        return gated_norm(mixed, z.view(mixed.shape), self.norm.weight, self.norm.eps).flatten(1)
