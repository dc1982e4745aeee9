"""A dense layer over the fewest rows of a decode step, as five kernels: each product takes along what stands in front of it.

    norm_linear    residual add, norm, q k v
    attend_few     norms of the heads, rotation, cache write, attention
    few_linear     output
    gate_up        residual add, norm, gate and up, silu(gate) * up
    few_linear     down

It means what `DenseLayer.forward` does. One stream is all latency: fewer kernels, and each begins while the last one runs.
"""

from typing import TYPE_CHECKING, cast

from torch import Tensor

from octavo.attention.backend import FewBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.kernels.ops import few_linear, gate_up, norm_linear
from octavo.layers.linear import Linear
from octavo.quant.base import Unquantized

if TYPE_CHECKING:
    from octavo.models.dense import DenseLayer


def few_rows(layer: "DenseLayer") -> int:
    """Up to how many rows the kernels compute this layer: none unless weights are plain, on one rank, with no bias on gate and up."""
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    plain = all(isinstance(linear.scheme, Unquantized) for linear in linears)
    return attention.backend.few_rows if plain and attention.output.comm.size == 1 and mlp.gate_up.bias is None else 0


def few(layer: "DenseLayer", x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """One new token in each row."""
    attention, norm = layer.attention, layer.attention_norm
    cache = batch.caches[attention.layer]
    qkv, residual = norm_linear(x, residual, norm.weight, norm.eps, *_parameters(attention.qkv))
    mixed = cast(FewBackend, attention.backend).attend_few(qkv, attention.norms, attention.rope, cache, batch)
    x = few_linear(mixed, *_parameters(attention.output))
    norm = layer.mlp_norm
    gated, residual = gate_up(x, residual, norm.weight, norm.eps, _parameters(layer.mlp.gate_up)[0])
    return few_linear(gated, *_parameters(layer.mlp.down)), residual


def _parameters(linear: Linear) -> tuple[Tensor, Tensor | None]:
    return cast(Tensor, linear.weight), cast(Tensor | None, linear.bias)
