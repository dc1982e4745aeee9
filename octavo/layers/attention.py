"""Self-attention as a layer: projections around a backend, which owns rotation, cache and softmax."""

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend, AttentionSpec, QKNorm, Rope
from octavo.attention.forward_batch import ForwardBatch
from octavo.layers.comm import Comm
from octavo.layers.linear import MergedLinear, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.model_config import ModelConfig
from octavo.quant.base import QuantScheme


class Attention(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rope: Rope,
        backend: type[AttentionBackend],
        scheme: QuantScheme,
        dtype: torch.dtype,
        comm: Comm,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.rope = rope
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = MergedLinear(config.hidden_size, {"q": q_size, "k": kv_size, "v": kv_size}, config.qkv_bias, scheme, dtype)
        self.output = RowParallelLinear(q_size, config.hidden_size, config.output_bias, scheme, dtype, comm)
        self.norms: QKNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, dtype)
            self.norms = QKNorm(self.q_norm.weight, self.k_norm.weight, config.norm_eps)
        self.backend = backend(
            AttentionSpec(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
                window=config.windows[layer],
            )
        )

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """What each token makes of the values it sees [T, heads * head_dim]; the output product is its own business."""
        cache = batch.caches[self.layer]
        q = self.backend.write(self.qkv(x), self.norms, self.rope, cache, batch)
        mixed = self.backend.attend(q, cache, batch, torch.empty_like(q, memory_format=torch.contiguous_format))
        return mixed.flatten(1)
