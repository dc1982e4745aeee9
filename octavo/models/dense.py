"""The torch module of the dense family (`dense_family.py` says what it is made of)."""

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend, Rope
from octavo.attention.forward_batch import ForwardBatch
from octavo.layers.attention import Attention
from octavo.layers.comm import Comm
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import build_rope
from octavo.models.decoder import Decoder
from octavo.models.dense_family import DenseConfig
from octavo.models.dense_few import few, few_rows
from octavo.quant.base import UNQUANTIZED, QuantScheme


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
