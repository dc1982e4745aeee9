"""Self-attention over keys and values: the mixer of every shipped model, with its projections around a backend.

The backend owns rotation, cache and softmax. A mixer is called as `mixer(x, cache, batch)`: `cache` has the buffers of its
layer, whose names only the mixer and its kernels know.
"""

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend, QKNorm, Rope
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.layers.comm import Comm
from octavo.layers.linear import MergedLinear, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.quant.base import QuantScheme


class Attention(nn.Module):
    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        bias: tuple[bool, bool],
        norm_eps: float,
        rope: Rope,
        backend: type[AttentionBackend],
        scheme: QuantScheme,
        dtype: torch.dtype,
        comm: Comm,
    ) -> None:
        """`bias`: whether q, k and v have one, and whether the output has one. `norm_eps`: of the norms on heads, if there are any."""
        super().__init__()
        self.rope = rope
        self.qkv = MergedLinear(hidden_size, spec.projections, bias[0], scheme, dtype)
        self.output = RowParallelLinear(spec.q_size, hidden_size, bias[1], scheme, dtype, comm)
        self.norms: QKNorm | None = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, norm_eps, dtype)
            self.k_norm = RMSNorm(spec.head_dim, norm_eps, dtype)
            self.norms = QKNorm(self.q_norm.weight, self.k_norm.weight, norm_eps)
        self.backend = backend(spec)

    def forward(self, x: Tensor, cache: Cache, batch: ForwardBatch) -> Tensor:
        """Returns what each token makes of the values it sees [T, heads * head_dim]. The caller applies `output`."""
        q = self.backend.write(self.qkv(x), self.norms, self.rope, cache, batch)
        mixed = self.backend.attend(q, cache, batch, torch.empty_like(q, memory_format=torch.contiguous_format))
        return mixed.flatten(1)
