"""The torch module of every decoder. `dense_family.py` defines its options, and each family selects them. A layer has one of three mixers.

A decode step of a small batch runs a layer as few fused kernels (`SmallBatch`), and any other step as the layer's modules.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.attention.backend import FewBackend, NewBackend, Rope
from octavo.attention.delta_net import DeltaNetSpec
from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.comm.comm import Comm
from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.gates import Gate
from octavo.kernels.ops import (
    few_linear,
    gate_and_mul,
    invariant_norm_gate_up,
    invariant_norm_linear,
    invariant_norm_router,
    merge_linear,
    merge_parts,
    norm_add_norm,
    norm_gate_up,
    norm_linear,
    norm_router,
    packed_gate_up,
)
from octavo.kernels.triton.gemv.tiles import FP8_GEMV_ROWS, FUSED_ROWS, MAX_HELD  # only rules: this module does not import triton
from octavo.layers.attention import Attention, build_rope
from octavo.layers.delta_net import DeltaNet
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.linear import LayerNorm, Linear, Norm, RMSNorm
from octavo.layers.mlp import MLP, Mixture, Routing
from octavo.model_config import RopeConfig
from octavo.models.decoder import Decoder, Scales
from octavo.models.dense_family import DenseConfig
from octavo.models.description import MLPShape, NormShape
from octavo.quant.schemes import UNQUANTIZED, Fp8, Packed, QuantScheme, Unquantized

Mixer = Attention | LatentAttention | DeltaNet


class DenseLayer(nn.Module):
    """A mixer, then the MLP. Norms are before a sub-layer, after it, or both; without one before, it reads the stream itself."""

    def __init__(
        self, config: DenseConfig, layer: int, mixer: Mixer, few: int, scheme: QuantScheme, dtype: torch.dtype, comm: Comm
    ) -> None:
        """`few`: the maximum number of rows of a small batch, 0 if there are no kernels for it"""
        super().__init__()
        shape = config.layers[layer]
        before, after = shape.norms != "after", shape.norms != "before"
        self.layer, self.residual_scale = layer, shape.residual_scale
        self.attention_norm = build_norm(config, shape.norm, dtype) if before else None
        self.attention = None if isinstance(mixer, DeltaNet) else mixer
        self.delta_net = mixer if isinstance(mixer, DeltaNet) else None
        self.attention_after_norm = build_norm(config, shape.norm, dtype) if after else None
        self.mlp_norm = build_norm(config, shape.norm, dtype) if before else None
        self.mlp = build_mlp(shape.mlp, config.hidden_size, config.mlp_bias, scheme, dtype, comm)
        self.mlp_after_norm = build_norm(config, shape.norm, dtype) if after else None
        norms = self.attention_norm, self.attention_after_norm, self.mlp_norm, self.mlp_after_norm
        self.small_batch: SmallBatch | None = None
        if not isinstance(mixer, LatentAttention):
            self.small_batch = SmallBatch(layer, mixer, self.mlp, norms, shape.residual_scale, few)
        self.in_order: InOrder | None = None

    @property
    def mixer(self) -> Mixer:
        return cast(Mixer, self.attention or self.delta_net)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if self.small_batch is not None and batch.max_query == 1 and len(x) <= self.small_batch.rows:
            return self.small_batch(x, residual, batch)
        if self.in_order is not None and len(x) <= FUSED_ROWS:
            return self.in_order(x, residual, batch)
        x, residual = joined(x, residual, self.attention_norm)
        x = self.mixer(x, batch.caches[self.layer], batch)  # names are reused, so that earlier tensors are freed before the MLP runs
        x, residual = self._between(self.mixer.output(x), residual)
        return self._added(self.mlp(x), self.mlp_after_norm), residual

    def sampled(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Like `forward`, but only the tokens to sample from pass the last MLP. Also returns the mixer's output for all tokens."""
        x, residual = joined(x, residual, self.attention_norm)
        mixed = self.mixer(x, batch.caches[self.layer], batch)
        x, residual = mixed.index_select(0, batch.sample_index), residual.index_select(0, batch.sample_index)
        x, residual = self._between(self.mixer.output(x), residual)
        return self._added(self.mlp(x), self.mlp_after_norm), residual, mixed

    def make_invariant(self) -> None:
        """Fuses the norms into the products of few rows, with the bits of other steps. Their schemes must be invariant."""
        norms = self.attention_norm, self.mlp_norm
        for norm in norms:
            if isinstance(norm, RMSNorm):
                norm.invariant = True
        plain = self.attention_after_norm is None and self.mlp_after_norm is None and self.residual_scale == 1
        if plain and isinstance(self.attention, Attention) and all(isinstance(norm, RMSNorm) for norm in norms):
            self.in_order = InOrder(self.layer, self.attention, self.mlp, *cast(tuple[RMSNorm, RMSNorm], norms))

    def _between(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the result of the mixer to the stream. Returns the input of the MLP, and the stream."""
        after, before = self.attention_after_norm, self.mlp_norm
        if isinstance(after, RMSNorm) and isinstance(before, RMSNorm):
            return norm_add_norm(x, residual, after.weight, before.weight, before.eps, self.residual_scale)
        return joined(self._added(x, after), residual, before)

    def _added(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Returns the result of a sub-layer as it is added to the stream."""
        x = x if norm is None else norm.alone(x)
        return x if self.residual_scale == 1 else x * self.residual_scale


class ParallelLayer(nn.Module):
    """Attention and the MLP read the same normed input, and both results are added."""

    def __init__(
        self, config: DenseConfig, layer: int, mixer: Mixer, few: int, scheme: QuantScheme, dtype: torch.dtype, comm: Comm
    ) -> None:
        super().__init__()
        shape = config.layers[layer]
        assert isinstance(mixer, Attention), "a recurrent layer, and one with a latent, has its sub-layers one after the other"
        assert shape.norms == "before" and shape.residual_scale == 1, "sub-layers in parallel have one norm, before both"
        self.layer, self.comm = layer, comm
        self.attention_norm = build_norm(config, shape.norm, dtype)
        self.attention = mixer
        self.mlp = MLP(config.hidden_size, shape.mlp.inner, config.mlp_bias, scheme, dtype, comm, shape.mlp.activation)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        return self._both(self.attention(x, batch.caches[self.layer], batch), x), residual

    def sampled(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Like `DenseLayer.sampled`."""
        x, residual = self.attention_norm(x, residual)
        mixed = self.attention(x, batch.caches[self.layer], batch)
        chosen, x, residual = (rows.index_select(0, batch.sample_index) for rows in (mixed, x, residual))
        return self._both(chosen, x), residual, mixed

    def _both(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Ranks sum both results at once."""
        added = self.attention.output.of_rank(mixed)
        del mixed  # freed before the MLP runs
        return self.comm.all_reduce(added + self.mlp.of_rank(x))


def build_norm(config: DenseConfig, shape: NormShape, dtype: torch.dtype) -> Norm:
    if shape.kind == "layer":
        return LayerNorm(config.hidden_size, shape.eps, shape.bias, dtype)
    return RMSNorm(config.hidden_size, shape.eps, torch.float32 if config.wide_norms else dtype)


def build_mixer(
    config: DenseConfig, layer: int, ropes: Mapping[RopeConfig | None, Rope], backend: NewBackend, scheme: QuantScheme, dtype: torch.dtype,
    comm: Comm,
) -> Mixer:  # fmt: skip
    own = config.layers[layer].mixer
    if isinstance(own, DeltaNetSpec):
        return DeltaNet(own, config.hidden_size, scheme, dtype, comm)
    spec = config.attention(layer)
    if spec.latent is not None:
        return LatentAttention(spec, config.hidden_size, ropes[spec.rope], backend, scheme, dtype, comm)
    bias, norm_dtype = (config.qkv_bias, config.output_bias), torch.float32 if config.wide_norms else dtype
    return Attention(spec, config.hidden_size, bias, config.norm.eps, ropes[spec.rope], backend, scheme, dtype, comm, norm_dtype)


def build_mlp(shape: MLPShape, hidden_size: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype, comm: Comm) -> MLP | Mixture:
    """Returns the MLP of a layer of this shape, or the MoE."""
    if (experts := shape.experts) is not None:
        assert shape.activation != "gelu", "experts have a gate"
        in_groups = None if experts.plain else (experts.groups, experts.chosen_groups)
        choice = experts.count, experts.chosen, experts.scores, experts.normed
        routing = Routing(*choice, experts.held, in_groups, experts.biased, experts.scale)
        sizes = hidden_size, shape.inner, experts.shared_inner
        return Mixture(*sizes, routing, shape.activation, bias, scheme, dtype, comm, experts.shared_gated)
    return MLP(hidden_size, shape.inner, bias, scheme, dtype, comm, shape.activation)


class DenseModel(Decoder):
    def __init__(
        self,
        config: DenseConfig,
        dtype: torch.dtype,
        backend: NewBackend,
        comm: Comm,
        max_len: int,
        scheme: QuantScheme = UNQUANTIZED,
    ) -> None:
        specs = [layer.mixer for layer in config.layers if isinstance(layer.mixer, AttentionSpec)]  # a stage may have none
        ropes = {rope: build_rope(rope, specs[0].rotated, max_len) for rope in {spec.rope for spec in specs}}
        kind = ParallelLayer if config.layers[0].parallel else DenseLayer
        mixers = [build_mixer(config, layer, ropes, backend, scheme, dtype, comm) for layer in range(config.num_layers)]
        few = min((mixer.backend.few_rows for mixer in mixers if isinstance(mixer, Attention)), default=0)
        layers = [kind(config, layer, mixer, few, scheme, dtype, comm) for layer, mixer in enumerate(mixers)]
        norm = build_norm(config, config.norm, dtype)
        embedding_norm = build_norm(config, config.norm, dtype) if config.normed_embedding else None
        scales = Scales(config.embedding_scale, config.logit_scale, config.logit_cap)
        super().__init__(config, layers, norm, scheme, dtype, comm, scales, embedding_norm)


# -- decode steps of small batches: a layer as five kernels, with the same result as the plain layer
#
#     norm_linear              residual add, norm, q k v
#     attend_few               norms of the heads, rotation, cache write, attention in splits
#     merge_linear             merge of the splits, output
#     norm_gate_up             norm of the attention output, residual add, norm, gate and up, silu(gate) * up
#     few_linear               down
#
# In an MoE layer, the last two are four: the router with the preceding operations, the selection, gate and up, down. A recurrent mixer,
# and attention with a gate, run their usual kernels between the first product and the output. A norm after the last product is a
# separate kernel. For quantised matrices, norms and the merge are separate kernels; for 8-bit floats the merge is, and from two rows on
# the norms, too. A single stream executes one kernel after another, so fewer of them are faster; and each starts while the previous one
# still runs.

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

    def __init__(self, layer: int, mixer: Attention | DeltaNet, mlp: MLP | Mixture, norms: Norms, residual_scale: float, rows: int) -> None:
        self._layer, self._mixer, self._mlp, self._scale = layer, mixer, mlp, residual_scale
        self.rows = rows if _is_known(mixer, mlp, norms) else 0
        self._norm, self._after_norm, self._mlp_norm, self._mlp_after_norm = cast(tuple[RMSNorm | None, ...], norms)

    def __call__(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        mlp, front = self._mlp, (self._after_norm, self._scale)
        x, residual = self._mix(x, residual, batch)
        x = self._mixer.output.comm.all_reduce(x)
        if isinstance(mlp, Mixture):
            logits, x, residual = _norm_linear_kept(mlp.router, x, residual, cast(RMSNorm, self._mlp_norm), *front)
            return self._added(mlp.mix(x, logits, few=True)), residual
        gated, residual = _gate_up(mlp, x, residual, self._mlp_norm, *front)
        return self._added(mlp.down.comm.all_reduce(_linear(mlp.down, gated))), residual

    def _mix(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        mixer = self._mixer
        if isinstance(mixer, DeltaNet):
            return self._recur(mixer, x, residual, batch)
        return (self._attend_and_gate if mixer.output_gate else self._attend)(mixer, x, residual, batch)

    def _attend(self, attention: Attention, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        qkv, residual = _norm_linear(attention.qkv, x, residual, self._norm)
        cache, backend = batch.caches[self._layer], cast(FewBackend, attention.backend)
        parts, parts_lse = backend.attend_few(qkv, attention.norms, attention.rope, cache, batch, attention.sinks)
        return _merge_linear(attention.output, parts, parts_lse, x.dtype), residual

    def _attend_and_gate(self, attention: Attention, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        projected, residual = _norm_linear(attention.qkv, x, residual, self._norm)
        return _linear(attention.output, attention.mix(projected, batch.caches[self._layer], batch)), residual

    def _recur(self, mixer: DeltaNet, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        projected, x, residual = _norm_linear_kept(mixer.in_proj, x, residual, cast(RMSNorm, self._norm))
        return _linear(mixer.output, mixer.mix(projected, _linear(mixer.gates, x), batch.caches[self._layer], batch)), residual

    def _added(self, x: Tensor) -> Tensor:
        x = x if self._mlp_after_norm is None else self._mlp_after_norm.alone(x)
        return x if self._scale == 1 else x * self._scale


class InOrder:
    """A layer for few tokens with `deterministic`: norms, and the gate, are fused into the products that follow or precede them.

    Every bit is that of the layer's modules, so the number of tokens may decide.
    """

    def __init__(self, layer: int, attention: Attention, mlp: MLP | Mixture, norm: RMSNorm, mlp_norm: RMSNorm) -> None:
        self._layer, self._attention, self._mlp, self._norm, self._mlp_norm = layer, attention, mlp, norm, mlp_norm

    def __call__(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        attention, mlp, norm = self._attention, self._mlp, self._mlp_norm
        qkv, residual = _norm_linear_in_order(attention.qkv, x, residual, self._norm)
        x = attention.output(attention.mix(qkv, batch.caches[self._layer], batch))
        if isinstance(mlp, Mixture) and _is_plain(mlp.router):
            logits, x, residual = invariant_norm_router(x, residual, norm.weight, norm.eps, *_parameters(mlp.router))
            return mlp.mix(x, logits), residual
        if isinstance(mlp, MLP) and _is_plain(mlp.gate_up) and mlp.gate == "swiglu" and mlp.gate_up.bias is None:
            gated, residual = invariant_norm_gate_up(x, residual, norm.weight, norm.eps, _parameters(mlp.gate_up)[0], mlp.gate)
            return mlp.down(gated), residual
        x, residual = norm(x, residual)
        return mlp(x), residual


def _is_plain(linear: Linear) -> bool:
    return isinstance(linear.scheme, Unquantized)


def _norm_linear_in_order(linear: Linear, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    if _is_plain(linear):
        return invariant_norm_linear(x, residual, norm.weight, norm.eps, *_parameters(linear))
    x, residual = norm(x, residual)
    return linear(x), residual


def _is_known(mixer: Attention | DeltaNet, mlp: MLP | Mixture, norms: Norms) -> bool:
    """Whether the kernels have all that the layer has."""
    first = mixer.in_proj if isinstance(mixer, DeltaNet) else mixer.qkv
    last: tuple[Linear, ...] = (mlp.gate_up, mlp.down) if isinstance(mlp, MLP) else (mlp.router,)
    if any(isinstance(norm, LayerNorm) for norm in norms) or (isinstance(mixer, DeltaNet) and norms[0] is None):
        return False
    gated = mlp.gate_up.bias is None and mlp.gate is not None if isinstance(mlp, MLP) else norms[2] is not None
    schemes = Unquantized, Packed, Fp8
    return gated and all(isinstance(one.scheme, schemes) and one.in_features <= MAX_HELD for one in (first, mixer.output, *last))


def _norm_linear(linear: Linear, x: Tensor, residual: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
    if not _is_fused(linear, len(x)):
        x, residual = joined(x, residual, norm)
        return linear.scheme.apply(linear, x), residual
    return norm_linear(x, residual, *_norm(norm), *_parameters(linear))


def _norm_linear_kept(
    linear: Linear, x: Tensor, residual: Tensor, norm: RMSNorm, after: RMSNorm | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `_norm_linear`. Also returns the normed rows, before the stream."""
    if not isinstance(linear.scheme, Unquantized):
        x = x if after is None else after.alone(x)
        x, residual = norm(x if scale == 1 else x * scale, residual)
        return linear.scheme.apply(linear, x), x, residual
    of_after = None if after is None else after.weight
    return norm_router(x, residual, norm.weight, norm.eps, *_parameters(linear), of_after, scale)


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
    return norm_gate_up(x, residual, weight, eps or after_eps, _parameters(linear)[0], of_after, scale, gate)


def _linear(linear: Linear, x: Tensor) -> Tensor:
    return few_linear(x, *_parameters(linear)) if isinstance(linear.scheme, Unquantized) else linear.scheme.apply(linear, x)


def _is_fused(linear: Linear, rows: int) -> bool:
    """Whether one kernel computes the product and the operations before it."""
    return isinstance(linear.scheme, Unquantized) or (isinstance(linear.scheme, Fp8) and rows <= FP8_GEMV_ROWS)


def _parameters(linear: Linear) -> tuple[Any, Tensor | None]:
    """Returns the matrix, a tensor or 8-bit floats, and the bias."""
    return linear.fp8 if isinstance(linear.scheme, Fp8) else linear.weight, cast(Tensor | None, linear.bias)
