"""A dense layer over the fewest rows of a decode step, as five kernels: each product takes along what stands in front of it.

    norm_linear              residual add, norm, q k v
    attend_few               norms of the heads, rotation, cache write, attention in splits
    merge_linear             merge of the splits, output
    gate_up                  residual add, norm, gate and up, silu(gate) * up
    few_linear               down

Of matrices that are kept as codes, norms and the merge stand apart from the products.
It means what `DenseLayer.forward` does. One stream is all latency: fewer kernels, and each begins while the last one runs.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from octavo.attention.backend import FewBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.kernels.ops import (
    few_linear,
    gate_up,
    merge_linear,
    merge_parts,
    norm_linear,
    packed_gate_up,
    packed_linear,
)
from octavo.kernels.triton.gemv.tiles import MAX_HELD  # rules alone: no triton there
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.quant.base import Unquantized
from octavo.quant.device_packed import Packed

if TYPE_CHECKING:
    from octavo.models.dense import DenseLayer


def few_rows(layer: "DenseLayer") -> int:
    """Up to how many rows the kernels compute this layer: none unless it is on one rank, with no bias on gate and up."""
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    known = all(isinstance(linear.scheme, (Unquantized, Packed)) and linear.in_features <= MAX_HELD for linear in linears)
    return attention.backend.few_rows if known and attention.output.comm.size == 1 and mlp.gate_up.bias is None else 0


def few(layer: "DenseLayer", x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """One new token in each row."""
    attention = layer.attention
    qkv, residual = _norm_linear(attention.qkv, x, residual, layer.attention_norm)
    cache = batch.caches[attention.layer]
    parts, parts_lse = cast(FewBackend, attention.backend).attend_few(qkv, attention.norms, attention.rope, cache, batch)
    x = _merge_linear(attention.output, parts, parts_lse, x.dtype)
    gated, residual = _gate_up(layer.mlp.gate_up, x, residual, layer.mlp_norm)
    return _linear(layer.mlp.down, gated), residual


def _norm_linear(linear: Linear, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    if _is_packed(linear):
        x, residual = norm(x, residual)
        return packed_linear(x, *_parameters(linear)), residual
    return norm_linear(x, residual, norm.weight, norm.eps, *_parameters(linear))


def _merge_linear(linear: Linear, parts: Tensor, parts_lse: Tensor, dtype: torch.dtype) -> Tensor:
    if _is_packed(linear):
        return packed_linear(merge_parts(parts, parts_lse, dtype), *_parameters(linear))
    return merge_linear(parts, parts_lse, *_parameters(linear))


def _gate_up(linear: Linear, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    if _is_packed(linear):
        x, residual = norm(x, residual)
        return packed_gate_up(x, _parameters(linear)[0]), residual
    return gate_up(x, residual, norm.weight, norm.eps, _parameters(linear)[0])


def _linear(linear: Linear, x: Tensor) -> Tensor:
    product = packed_linear if _is_packed(linear) else few_linear
    return product(x, *_parameters(linear))


def _is_packed(linear: Linear) -> bool:
    return isinstance(linear.scheme, Packed)


def _parameters(linear: Linear) -> tuple[Any, Tensor | None]:
    """The matrix, a tensor or codes, and the bias."""
    return linear.codes if _is_packed(linear) else linear.weight, cast(Tensor | None, linear.bias)
