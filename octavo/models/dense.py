"""The torch module of every dense decoder. `dense_family.py` defines its options, and each family selects them."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend, FewBackend, Rope
from octavo.attention.forward_batch import ForwardBatch
from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.gates import Gate
from octavo.kernels.ops import (
    few_linear,
    gate_and_mul,
    gate_up,
    merge_linear,
    merge_parts,
    norm_add_norm,
    norm_linear,
    norm_router,
    packed_gate_up,
)
from octavo.kernels.triton.gemv.tiles import FP8_GEMV_ROWS, MAX_HELD  # only rules: this module does not import triton
from octavo.layers.attention import Attention, build_rope
from octavo.layers.comm import Comm
from octavo.layers.linear import MLP, Linear, RMSNorm
from octavo.layers.mixture import Mixture, Routing
from octavo.models.decoder import Decoder, Scales
from octavo.models.dense_family import DenseConfig
from octavo.policy.description import MLPShape
from octavo.quant.schemes import UNQUANTIZED, Fp8, Packed, QuantScheme, Unquantized


class DenseLayer(nn.Module):
    """Norms are before a sub-layer, after it, or both. Without one before, a sub-layer reads the stream itself."""

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
        shape, norm_dtype = config.layer(layer), torch.float32 if config.wide_norms else dtype
        before, after = shape.norms != "after", shape.norms != "before"
        self.layer, self.residual_scale = layer, shape.residual_scale
        self.attention_norm = RMSNorm(hidden, eps, norm_dtype) if before else None
        self.attention = Attention(config.attention(layer), hidden, bias, eps, rope, backend, scheme, dtype, comm, norm_dtype)
        self.attention_after_norm = RMSNorm(hidden, eps, norm_dtype) if after else None
        self.mlp_norm = RMSNorm(hidden, eps, norm_dtype) if before else None
        self.mlp = build_mlp(shape.mlp, hidden, config.mlp_bias, scheme, dtype, comm)
        self.mlp_after_norm = RMSNorm(hidden, eps, norm_dtype) if after else None
        self.few_rows = few_rows(self)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if batch.max_query == 1 and len(x) <= self.few_rows:
            return few(self, x, residual, batch)
        x, residual = self._mix(x, residual, batch)  # names are reused, so that earlier tensors are freed before the MLP runs
        x, residual = self._join(x, residual)
        return self._added(self.mlp(x), self.mlp_after_norm), residual

    def sampled(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Like `forward`, but only the tokens to sample from pass the last MLP. Also returns the mixer's output for all tokens."""
        mixed, residual = self._mix(x, residual, batch)
        index = batch.sample_index
        x, residual = self._join(mixed.index_select(0, index), residual.index_select(0, index))
        return self._added(self.mlp(x), self.mlp_after_norm), residual, mixed

    def _mix(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = _read(x, residual, self.attention_norm)
        return self.attention(x, batch.caches[self.layer], batch), residual

    def _join(self, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, after, before = self.attention.output(mixed), self.attention_after_norm, self.mlp_norm
        if after is not None and before is not None:
            return norm_add_norm(x, residual, after.weight, before.weight, before.eps, self.residual_scale)
        return _read(self._added(x, after), residual, before)

    def _added(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Returns a sub-layer's output as it is added to the stream."""
        x = x if norm is None else norm.alone(x)
        return x if self.residual_scale == 1 else x * self.residual_scale


def _read(x: Tensor, residual: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
    """Adds x to the stream. Returns the input of the next sub-layer, and the stream."""
    if norm is None:
        stream = residual + x
        return stream, stream
    read, stream = norm(x, residual)
    return read, stream


def build_mlp(shape: MLPShape, hidden_size: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype, comm: Comm) -> MLP | Mixture:
    """Returns the MLP of a layer of this shape, or the MoE."""
    if (experts := shape.experts) is not None:
        routing = Routing(experts.count, experts.chosen, experts.scores, experts.normed, experts.held)
        return Mixture(hidden_size, shape.inner, experts.shared_inner, routing, shape.activation, bias, scheme, dtype, comm)
    return MLP(hidden_size, shape.inner, bias, scheme, dtype, comm, shape.activation)


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
        rotated = config.attention(0).rotated
        ropes = {rope: build_rope(rope, rotated, max_len) for rope in map(config.rope_of, range(config.num_layers))}
        layers = [
            DenseLayer(config, layer, ropes[config.rope_of(layer)], backend, scheme, dtype, comm) for layer in range(config.num_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.norm_eps, torch.float32 if config.wide_norms else dtype)
        scales = Scales(config.embedding_scale, config.logit_scale, config.logit_cap)
        super().__init__(config, layers, norm, scheme, dtype, comm, scales)


# -- decode steps of small batches, as five kernels; each product includes the small operations before it
#
#     norm_linear              residual add, norm, q k v
#     attend_few               norms of the heads, rotation, cache write, attention in splits
#     merge_linear             merge of the splits, output
#     gate_up                  norm of the attention output, residual add, norm, gate and up, silu(gate) * up
#     few_linear               down
#
# In an MoE layer, the last two are four: the router with the preceding operations, the selection, gate and up, down. A norm after the
# last product is a separate kernel. For quantised matrices, norms and the merge are separate kernels; for 8-bit floats the
# merge is, and from two rows on the norms, too. The result equals that of the plain layer. A single stream executes one kernel after
# another, so fewer of them are faster; and each starts while the previous one still runs.


def few_rows(layer: DenseLayer) -> int:
    """Returns the maximum rows of these kernels: 0 if the layer has something that they do not support, such as biases on gate and up."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(mlp, MLP):
        linears: tuple[Linear, ...] = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
        known = mlp.gate_up.bias is None and mlp.gate is not None
    else:
        linears, known = (attention.qkv, attention.output, mlp.router), layer.mlp_norm is not None
    known &= all(isinstance(linear.scheme, (Unquantized, Packed, Fp8)) and linear.in_features <= MAX_HELD for linear in linears)
    return attention.backend.few_rows if known else 0


def few(layer: DenseLayer, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Computes the layer for one new token in each of at most `few_rows` rows."""
    attention, mlp = layer.attention, layer.mlp
    qkv, residual = _norm_linear(attention.qkv, x, residual, layer.attention_norm)
    cache, backend = batch.caches[layer.layer], cast(FewBackend, attention.backend)
    parts, parts_lse = backend.attend_few(qkv, attention.norms, attention.rope, cache, batch, attention.sinks)
    x = attention.output.comm.all_reduce(_merge_linear(attention.output, parts, parts_lse, x.dtype))
    front = layer.attention_after_norm, layer.residual_scale
    if isinstance(mlp, Mixture):
        logits, x, residual = _norm_router(mlp.router, x, residual, cast(RMSNorm, layer.mlp_norm), *front)
        return layer._added(mlp.mix(x, logits), layer.mlp_after_norm), residual
    gated, residual = _gate_up(mlp, x, residual, layer.mlp_norm, *front)
    return layer._added(mlp.down.comm.all_reduce(_linear(mlp.down, gated)), layer.mlp_after_norm), residual


def _norm_linear(linear: Linear, x: Tensor, residual: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
    if not _is_fused(linear, len(x)):
        x, residual = _read(x, residual, norm)
        return linear.scheme.apply(linear, x), residual
    return norm_linear(x, residual, *_norm(norm), *_parameters(linear))


def _norm_router(
    router: Linear, x: Tensor, residual: Tensor, norm: RMSNorm, after: RMSNorm | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(router.scheme, Unquantized):
        x = x if after is None else after.alone(x)
        x, residual = norm(x if scale == 1 else x * scale, residual)
        return router(x), x, residual
    of_after = None if after is None else after.weight
    return norm_router(x, residual, norm.weight, norm.eps, *_parameters(router), of_after, scale)


def _norm(norm: RMSNorm | None) -> tuple[Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)


def _merge_linear(linear: Linear, parts: Tensor, parts_lse: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(linear.scheme, Unquantized):
        return merge_linear(parts, parts_lse, *_parameters(linear))
    return linear.scheme.apply(linear, merge_parts(parts, parts_lse, dtype))


def _gate_up(
    mlp: MLP, x: Tensor, residual: Tensor, norm: RMSNorm | None, after: RMSNorm | None, scale: float
) -> tuple[Tensor, Tensor]:
    linear, gate = mlp.gate_up, cast(Gate, mlp.gate)
    if not _is_fused(linear, len(x)):
        x = x if after is None else after.alone(x)
        x, residual = _read(x if scale == 1 else x * scale, residual, norm)
        if isinstance(linear.scheme, Packed):
            return packed_gate_up(x, cast(DeviceCodes, linear.codes), gate), residual
        return gate_and_mul(linear.scheme.apply(linear, x), gate), residual
    weight, eps = _norm(norm)
    of_after, after_eps = _norm(after)
    return gate_up(x, residual, weight, eps or after_eps, _parameters(linear)[0], of_after, scale, gate)


def _linear(linear: Linear, x: Tensor) -> Tensor:
    return few_linear(x, *_parameters(linear)) if isinstance(linear.scheme, Unquantized) else linear.scheme.apply(linear, x)


def _is_fused(linear: Linear, rows: int) -> bool:
    """Whether one kernel computes the product and the operations before it."""
    return isinstance(linear.scheme, Unquantized) or (isinstance(linear.scheme, Fp8) and rows <= FP8_GEMV_ROWS)


def _parameters(linear: Linear) -> tuple[Any, Tensor | None]:
    """Returns the matrix, a tensor or 8-bit floats, and the bias."""
    return linear.fp8 if isinstance(linear.scheme, Fp8) else linear.weight, cast(Tensor | None, linear.bias)
