"""The torch module of the dense family. `dense_family.py` says what it is made of."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend, FewBackend, Rope
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
from octavo.layers.attention import Attention, build_rope
from octavo.layers.comm import Comm
from octavo.layers.linear import MLP, Linear, RMSNorm
from octavo.models.decoder import Decoder
from octavo.models.dense_family import DenseConfig
from octavo.quant.schemes import UNQUANTIZED, Packed, QuantScheme, Unquantized


class DenseLayer(nn.Module):
    def __init__(
        self,
        config: DenseConfig,
        layer: int,
        rope: Rope,
        backend: type[AttentionBackend],
        scheme: QuantScheme,
        dtype: torch.dtype,
        comm: Comm,
    ) -> None:
        super().__init__()
        hidden, eps, bias = config.hidden_size, config.norm_eps, (config.qkv_bias, config.output_bias)
        self.layer = layer
        self.attention_norm = RMSNorm(hidden, eps, dtype)
        self.attention = Attention(config.attention(layer), hidden, bias, eps, rope, backend, scheme, dtype, comm)
        self.mlp_norm = RMSNorm(hidden, eps, dtype)
        self.mlp = MLP(hidden, config.intermediate_size, config.mlp_bias, scheme, dtype, comm)
        self.few_rows = few_rows(self)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if batch.max_query == 1 and len(x) <= self.few_rows:
            return few(self, x, residual, batch)
        x, residual = self._mix(x, residual, batch)  # names are used again: what went before is not held while the MLP runs
        x, residual = self._join(x, residual)
        return self.mlp(x), residual

    def sampled(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """As `forward`, but only the tokens to sample from go on after the mixer. Also returns what the mixer gave every token."""
        mixed, residual = self._mix(x, residual, batch)
        index = batch.sample_index
        x, residual = self._join(mixed.index_select(0, index), residual.index_select(0, index))
        return self.mlp(x), residual, mixed

    def _mix(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        return self.attention(x, batch.caches[self.layer], batch), residual

    def _join(self, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.mlp_norm(self.attention.output(mixed), residual)
        return x, residual


class DenseModel(Decoder):
    def __init__(
        self,
        config: DenseConfig,
        dtype: torch.dtype,
        backend: type[AttentionBackend],
        comm: Comm,
        max_len: int,
        scheme: QuantScheme = UNQUANTIZED,
    ) -> None:
        rope = build_rope(config.rope, config.head_dim, max_len)
        layers = [DenseLayer(config, layer, rope, backend, scheme, dtype, comm) for layer in range(config.num_layers)]
        super().__init__(config, layers, RMSNorm(config.hidden_size, config.norm_eps, dtype), scheme, dtype, comm)


# -- a few rows of a decode step, as five kernels; each product includes the small operations before it
#
#     norm_linear              residual add, norm, q k v
#     attend_few               norms of the heads, rotation, cache write, attention in splits
#     merge_linear             merge of the splits, output
#     gate_up                  residual add, norm, gate and up, silu(gate) * up
#     few_linear               down
#
# For matrices that are kept as codes, norms and the merge are separate kernels. The result is that of the plain layer. A single
# stream waits for one kernel after the other, so fewer of them make it faster; and each begins while the one before still runs.


def few_rows(layer: DenseLayer) -> int:
    """Returns the most rows that these kernels can compute: 0 if the layer has a bias on gate and up."""
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    known = all(isinstance(linear.scheme, (Unquantized, Packed)) and linear.in_features <= MAX_HELD for linear in linears)
    return attention.backend.few_rows if known and mlp.gate_up.bias is None else 0


def few(layer: DenseLayer, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Computes the layer for one new token in each row."""
    attention = layer.attention
    qkv, residual = _norm_linear(attention.qkv, x, residual, layer.attention_norm)
    cache = batch.caches[layer.layer]
    parts, parts_lse = cast(FewBackend, attention.backend).attend_few(qkv, attention.norms, attention.rope, cache, batch)
    x = attention.output.comm.all_reduce(_merge_linear(attention.output, parts, parts_lse, x.dtype))
    gated, residual = _gate_up(layer.mlp.gate_up, x, residual, layer.mlp_norm)
    return layer.mlp.down.comm.all_reduce(_linear(layer.mlp.down, gated)), residual


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
    """Returns the matrix, a tensor or codes, and the bias."""
    return linear.codes if _is_packed(linear) else linear.weight, cast(Tensor | None, linear.bias)
