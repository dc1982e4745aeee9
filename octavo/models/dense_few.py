"""A dense layer over the fewest rows of a decode step, as five kernels: each product takes along what stands in front of it.

    norm_linear              residual add, norm, q k v
    decode_attention_parts   norms of the heads, rotation, cache write, attention in splits
    merge_linear             merge of the splits, output
    gate_up                  residual add, norm, gate and up, silu(gate) * up
    linear                   down

It means what `DenseLayer.forward` does. One stream is all latency: fewer kernels, and each begins while the last one runs.
"""

from typing import Protocol, cast

from torch import Tensor

from octavo.attention.forward_batch import ForwardBatch
from octavo.kernels.triton.few_tiles import FEW_ROWS
from octavo.layers.linear import Linear
from octavo.models.dense import DenseLayer
from octavo.quant.base import Unquantized

__all__ = ["FEW_ROWS", "FewKernels", "few", "takes_few"]


class FewKernels(Protocol):
    """What a device brings: the Triton kernels, or their twins."""

    def norm_linear(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...

    def decode_attention_parts(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        tables: Tensor,
        context_len: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]: ...

    def merge_linear(self, parts: Tensor, parts_lse: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def gate_up(self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


def takes_few(layer: DenseLayer) -> bool:
    """Whether the kernels can compute this layer at all: plain weights on one rank, no bias on gate and up, heads of a known size."""
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    head_dim = attention.backend.spec.head_dim
    return (
        all(isinstance(linear.scheme, Unquantized) for linear in linears)
        and attention.output.comm.size == 1
        and mlp.gate_up.bias is None
        and 16 <= head_dim <= 256
        and head_dim & (head_dim - 1) == 0
    )


def few(layer: DenseLayer, x: Tensor, residual: Tensor, batch: ForwardBatch, kernels: FewKernels) -> tuple[Tensor, Tensor]:
    """One new token in each of at most FEW_ROWS rows; the cache keeps keys and values in the dtype of the model."""
    attention, spec = layer.attention, layer.attention.backend.spec
    cache, rope = batch.caches[attention.layer], attention.rope
    norms = None if attention.norms is None else (attention.norms.q_weight, attention.norms.k_weight, attention.norms.eps)
    norm = layer.attention_norm
    qkv, residual = kernels.norm_linear(x, residual, norm.weight, norm.eps, *_parameters(attention.qkv))
    parts, parts_lse = kernels.decode_attention_parts(
        qkv, norms, rope.cos, rope.sin, batch.positions[0], batch.slots, batch.tables, batch.context_len, cache["k"], cache["v"],
        spec.scale, spec.window,
    )  # fmt: skip
    x = kernels.merge_linear(parts, parts_lse, *_parameters(attention.output))
    norm = layer.mlp_norm
    gated, residual = kernels.gate_up(x, residual, norm.weight, norm.eps, _parameters(layer.mlp.gate_up)[0])
    return kernels.linear(gated, *_parameters(layer.mlp.down)), residual


def _parameters(linear: Linear) -> tuple[Tensor, Tensor | None]:
    return cast(Tensor, linear.weight), cast(Tensor | None, linear.bias)
