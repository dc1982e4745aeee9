"""Decode steps of small batches: a layer as five kernels. The result equals that of the plain layer.

    norm_linear              residual add, norm, q k v
    attend_few               norms of the heads, rotation, cache write, attention in splits
    merge_linear             merge of the splits, output
    gate_up                  norm of the attention output, residual add, norm, gate and up, silu(gate) * up
    few_linear               down

In an MoE layer, the last two are four: the router with the preceding operations, the selection, gate and up, down. A norm after the
last product is a separate kernel. For quantised matrices, norms and the merge are separate kernels; for 8-bit floats the merge is, and
from two rows on the norms, too. A single stream executes one kernel after another, so fewer of them are faster; and each starts while
the previous one still runs.
"""

from typing import Any, cast

import torch
from torch import Tensor

from octavo.attention.backend import FewBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.gates import Gate
from octavo.kernels.ops import few_linear, gate_and_mul, gate_up, merge_linear, merge_parts, norm_linear, norm_router, packed_gate_up
from octavo.kernels.triton.gemv.tiles import FP8_GEMV_ROWS, MAX_HELD  # only rules: this module does not import triton
from octavo.layers.attention import Attention
from octavo.layers.linear import MLP, LayerNorm, Linear, Norm, RMSNorm
from octavo.layers.mixture import Mixture
from octavo.quant.schemes import Fp8, Packed, Unquantized

Norms = tuple[Norm | None, Norm | None, Norm | None, Norm | None]  # before and after attention, before and after the MLP


def joined(x: Tensor, residual: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Adds x to the stream. Returns the input of the next sub-layer, and the stream."""
    if norm is None:
        stream = residual + x
        return stream, stream
    read, stream = norm(x, residual)
    return read, stream


class SmallBatch:
    """The kernels of a layer, for one new token in each of at most `rows` rows: 0 if they lack something that the layer has."""

    def __init__(self, layer: int, attention: Attention, mlp: MLP | Mixture, norms: Norms, residual_scale: float) -> None:
        self._layer, self._attention, self._mlp, self._scale = layer, attention, mlp, residual_scale
        self.rows = 0 if any(isinstance(norm, LayerNorm) for norm in norms) else _most_rows(attention, mlp, norms[2])
        self._norm, self._after_norm, self._mlp_norm, self._mlp_after_norm = cast(tuple[RMSNorm | None, ...], norms)

    def __call__(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        attention, mlp = self._attention, self._mlp
        qkv, residual = _norm_linear(attention.qkv, x, residual, self._norm)
        cache, backend = batch.caches[self._layer], cast(FewBackend, attention.backend)
        parts, parts_lse = backend.attend_few(qkv, attention.norms, attention.rope, cache, batch, attention.sinks)
        x = attention.output.comm.all_reduce(_merge_linear(attention.output, parts, parts_lse, x.dtype))
        front = self._after_norm, self._scale
        if isinstance(mlp, Mixture):
            logits, x, residual = _norm_router(mlp.router, x, residual, cast(RMSNorm, self._mlp_norm), *front)
            return self._added(mlp.mix(x, logits)), residual
        gated, residual = _gate_up(mlp, x, residual, self._mlp_norm, *front)
        return self._added(mlp.down.comm.all_reduce(_linear(mlp.down, gated))), residual

    def _added(self, x: Tensor) -> Tensor:
        x = x if self._mlp_after_norm is None else self._mlp_after_norm.alone(x)
        return x if self._scale == 1 else x * self._scale


def _most_rows(attention: Attention, mlp: MLP | Mixture, mlp_norm: Norm | None) -> int:
    if isinstance(mlp, MLP):
        linears: tuple[Linear, ...] = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
        known = mlp.gate_up.bias is None and mlp.gate is not None
    else:
        linears, known = (attention.qkv, attention.output, mlp.router), mlp_norm is not None
    known &= all(isinstance(linear.scheme, (Unquantized, Packed, Fp8)) and linear.in_features <= MAX_HELD for linear in linears)
    return attention.backend.few_rows if known else 0


def _norm_linear(linear: Linear, x: Tensor, residual: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
    if not _is_fused(linear, len(x)):
        x, residual = joined(x, residual, norm)
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
        x, residual = joined(x if scale == 1 else x * scale, residual, norm)
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
