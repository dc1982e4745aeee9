"""Llama, Qwen2 and Qwen3: one dense decoder. They differ only by flags of the config.

    Llama   plain         Qwen2   biases on q, k, v         Qwen3   norms on the heads of q and k
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend, Rope
from octavo.attention.forward_batch import ForwardBatch
from octavo.layers.attention import Attention
from octavo.layers.comm import Comm
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import build_rope
from octavo.model_config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense_few import few, few_rows
from octavo.quant.base import UNQUANTIZED, QuantScheme


class DenseLayer(nn.Module):
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
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.attention = Attention(config, layer, rope, backend, scheme, dtype, comm)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, scheme, dtype, comm)
        self.few_rows = few_rows(self)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if batch.max_query == 1 and len(x) <= self.few_rows:
            return few(self, x, residual, batch)
        return self.after(*self.attend(x, residual, batch))

    def attend(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        return self.attention(x, batch), residual

    def after(self, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.mlp_norm(self.attention.output(mixed), residual)
        return self.mlp(x), residual


class DenseModel(Decoder):
    RULES: ClassVar[dict[str, tuple[str, str | None]]] = {
        "model.embed_tokens": ("embed", None),
        "model.layers.*.input_layernorm": ("layers.*.attention_norm", None),
        "model.layers.*.self_attn.q_proj": ("layers.*.attention.qkv", "q"),
        "model.layers.*.self_attn.k_proj": ("layers.*.attention.qkv", "k"),
        "model.layers.*.self_attn.v_proj": ("layers.*.attention.qkv", "v"),
        "model.layers.*.self_attn.q_norm": ("layers.*.attention.q_norm", None),
        "model.layers.*.self_attn.k_norm": ("layers.*.attention.k_norm", None),
        "model.layers.*.self_attn.o_proj": ("layers.*.attention.output", None),
        "model.layers.*.post_attention_layernorm": ("layers.*.mlp_norm", None),
        "model.layers.*.mlp.gate_proj": ("layers.*.mlp.gate_up", "gate"),
        "model.layers.*.mlp.up_proj": ("layers.*.mlp.gate_up", "up"),
        "model.layers.*.mlp.down_proj": ("layers.*.mlp.down", None),
        "model.norm": ("norm", None),
        "lm_head": ("head", None),
    }

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        backend: type[AttentionBackend],
        comm: Comm,
        max_len: int,
        scheme: QuantScheme = UNQUANTIZED,
    ) -> None:
        rope = build_rope(config.rope, config.head_dim, max_len)
        layers = [DenseLayer(config, layer, rope, backend, scheme, dtype, comm) for layer in range(config.num_layers)]
        super().__init__(config, layers, scheme, dtype, comm)
