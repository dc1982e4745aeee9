"""The torch module of every dense decoder. `dense_family.py` defines its options, and each family selects them."""

import torch
from torch import Tensor, nn

from octavo.attention.backend import NewBackend, Rope
from octavo.attention.forward_batch import ForwardBatch
from octavo.comm.comm import Comm
from octavo.kernels.ops import norm_add_norm
from octavo.layers.attention import Attention, build_rope
from octavo.layers.linear import MLP, LayerNorm, Norm, RMSNorm
from octavo.layers.mixture import Mixture, Routing
from octavo.models.decoder import Decoder, Scales
from octavo.models.dense_family import DenseConfig
from octavo.models.description import MLPShape, NormShape
from octavo.models.small_batch import SmallBatch, joined
from octavo.quant.schemes import UNQUANTIZED, QuantScheme


class DenseLayer(nn.Module):
    """Attention, then the MLP. Norms are before a sub-layer, after it, or both; without one before, it reads the stream itself."""

    def __init__(
        self, config: DenseConfig, layer: int, rope: Rope, backend: NewBackend, scheme: QuantScheme, dtype: torch.dtype,
        comm: Comm,
    ) -> None:  # fmt: skip
        super().__init__()
        shape = config.layers[layer]
        before, after = shape.norms != "after", shape.norms != "before"
        self.layer, self.residual_scale = layer, shape.residual_scale
        self.attention_norm = build_norm(config, shape.norm, dtype) if before else None
        self.attention = build_attention(config, layer, rope, backend, scheme, dtype, comm)
        self.attention_after_norm = build_norm(config, shape.norm, dtype) if after else None
        self.mlp_norm = build_norm(config, shape.norm, dtype) if before else None
        self.mlp = build_mlp(shape.mlp, config.hidden_size, config.mlp_bias, scheme, dtype, comm)
        self.mlp_after_norm = build_norm(config, shape.norm, dtype) if after else None
        norms = self.attention_norm, self.attention_after_norm, self.mlp_norm, self.mlp_after_norm
        self.small_batch = SmallBatch(layer, self.attention, self.mlp, norms, self.residual_scale)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if batch.max_query == 1 and len(x) <= self.small_batch.rows:
            return self.small_batch(x, residual, batch)
        x, residual = joined(x, residual, self.attention_norm)
        x = self.attention(x, batch.caches[self.layer], batch)  # names are reused, so that earlier tensors are freed before the MLP runs
        x, residual = self._between(self.attention.output(x), residual)
        return self._added(self.mlp(x), self.mlp_after_norm), residual

    def sampled(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Like `forward`, but only the tokens to sample from pass the last MLP. Also returns the mixer's output for all tokens."""
        x, residual = joined(x, residual, self.attention_norm)
        mixed = self.attention(x, batch.caches[self.layer], batch)
        x, residual = mixed.index_select(0, batch.sample_index), residual.index_select(0, batch.sample_index)
        x, residual = self._between(self.attention.output(x), residual)
        return self._added(self.mlp(x), self.mlp_after_norm), residual, mixed

    def _between(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the result of attention to the stream. Returns the input of the MLP, and the stream."""
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
        self, config: DenseConfig, layer: int, rope: Rope, backend: NewBackend, scheme: QuantScheme, dtype: torch.dtype,
        comm: Comm,
    ) -> None:  # fmt: skip
        super().__init__()
        shape = config.layers[layer]
        assert shape.norms == "before" and shape.residual_scale == 1, "sub-layers in parallel have one norm, before both"
        self.layer, self.comm = layer, comm
        self.attention_norm = build_norm(config, shape.norm, dtype)
        self.attention = build_attention(config, layer, rope, backend, scheme, dtype, comm)
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


def build_attention(
    config: DenseConfig, layer: int, rope: Rope, backend: NewBackend, scheme: QuantScheme, dtype: torch.dtype, comm: Comm
) -> Attention:
    bias, norm_dtype = (config.qkv_bias, config.output_bias), torch.float32 if config.wide_norms else dtype
    return Attention(config.attention(layer), config.hidden_size, bias, config.norm.eps, rope, backend, scheme, dtype, comm, norm_dtype)


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
        backend: NewBackend,
        comm: Comm,
        max_len: int,
        scheme: QuantScheme = UNQUANTIZED,
    ) -> None:
        specs = [config.attention(layer) for layer in range(config.num_layers)]
        ropes = {rope: build_rope(rope, specs[0].rotated, max_len) for rope in {spec.rope for spec in specs}}
        kind = ParallelLayer if config.layers[0].parallel else DenseLayer
        layers = [kind(config, layer, ropes[spec.rope], backend, scheme, dtype, comm) for layer, spec in enumerate(specs)]
        norm = build_norm(config, config.norm, dtype)
        embedding_norm = build_norm(config, config.norm, dtype) if config.normed_embedding else None
        scales = Scales(config.embedding_scale, config.logit_scale, config.logit_cap)
        super().__init__(config, layers, norm, scheme, dtype, comm, scales, embedding_norm)
