"""Multi-head latent attention (MLA): attention over one latent and one rotary key per token, which all heads share.

    down.weight    [ q: of all heads, or q_latent: what it is computed from | kv: the latent, the rotary key ]
    q_up.weight    q of all heads, from its latent; a head is [ plain | rotary ]
    k_up, v_up     W_UK and W_UV of all heads, one below the other: always floats

    x -> down -> norm -> q_up -> write_latent -> attention over latents -> expand -> output
                                 norm, rotation -> cache

It is called as attention is: `mixer(x, cache, batch)`. Prompts and decode steps take the same way: q is multiplied by W_UK, so that no
keys and values of single heads are ever computed.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from octavo.attention.backend import LatentBackend, NewBackend, Rope
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import LATENT_NORM_EPS, AttentionSpec
from octavo.comm.comm import Comm
from octavo.kernels.ops import expand
from octavo.layers.linear import Linear, MergedLinear, RMSNorm, RowParallelLinear
from octavo.quant.schemes import QuantScheme, empty_parameter


class HeadStack(nn.Module):
    """A matrix of each head, one below the other."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(rows, columns, dtype=dtype)


class LatentAttention(nn.Module):
    def __init__(
        self, spec: AttentionSpec, hidden_size: int, rope: Rope, backend: NewBackend, scheme: QuantScheme, dtype: torch.dtype, comm: Comm
    ) -> None:
        super().__init__()
        assert spec.latent is not None, "this attention has keys and values of each head"
        latent, rank = spec.latent, spec.value_dim
        self.rope, self.widths = rope, [*spec.projections.values()]
        self.down = MergedLinear(hidden_size, spec.projections, False, scheme, dtype)
        self.q_norm: RMSNorm | None = None
        if latent.q_rank is not None:
            self.q_norm = RMSNorm(latent.q_rank, LATENT_NORM_EPS, dtype)
            self.q_up = Linear(latent.q_rank, spec.projected_q, False, scheme, dtype)
        self.kv_norm = RMSNorm(rank, LATENT_NORM_EPS, dtype)
        self.k_up = HeadStack(spec.num_heads * latent.plain_dim, rank, dtype)
        self.v_up = HeadStack(spec.result_size, rank, dtype)
        self.output = RowParallelLinear(spec.result_size, hidden_size, False, scheme, dtype, comm)
        self.expand: Callable[[Tensor, Tensor], Tensor] = expand
        self.backend = cast(LatentBackend, backend(spec))

    def forward(self, x: Tensor, cache: Cache, batch: ForwardBatch) -> Tensor:
        """Returns the values of each token [T, heads * value_dim]. The caller applies `output`."""
        q, kv = self.down(x).split(self.widths, dim=1)
        if self.q_norm is not None:
            q = self.q_up(self.q_norm.alone(q))
        norm = self.kv_norm.weight, self.kv_norm.eps
        q = self.backend.write_latent(q, kv, self.k_up.weight, norm, self.rope, cache, batch)
        mixed = self.backend.attend(q, cache, batch, q.new_empty(*q.shape[:2], self.kv_norm.weight.shape[0]))
        return self.expand(mixed, self.v_up.weight)
