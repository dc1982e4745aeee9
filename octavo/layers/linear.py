"""The parts of a layer around its mixer: matrices over a quantisation scheme, norm and MLP.

    Linear             y = x W^T + b
    MergedLinear       several projections of one x as one product; each is a named slice of the rows of W
    RowParallelLinear  its input may be split over ranks, whose results are summed
    Embedding, LMHead  the first and the last matrix of a model, which may be the same
    RMSNorm, MLP       the norm between two sub-layers; the gated MLP

    qkv.weight   [ q: heads * head_dim rows | k: kv_heads * head_dim | v: kv_heads * head_dim ]
"""

from itertools import accumulate

import torch
from torch import Tensor, nn

from octavo.kernels.ops import add_rms_norm
from octavo.layers.comm import Comm
from octavo.quant.schemes import QuantScheme, empty_parameter


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype) -> None:
        super().__init__()
        self.scheme, self.in_features = scheme, in_features
        scheme.params(self, in_features, out_features, bias, dtype)

    def finalize(self) -> None:
        self.scheme.finalize(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.scheme.apply(self, x)


class MergedLinear(Linear):
    def __init__(self, in_features: int, sizes: dict[str, int], bias: bool, scheme: QuantScheme, dtype: torch.dtype) -> None:
        super().__init__(in_features, sum(sizes.values()), bias, scheme, dtype)
        ends = accumulate(sizes.values())
        self.parts = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


class RowParallelLinear(Linear):
    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype, comm: Comm) -> None:
        super().__init__(in_features, out_features, bias, scheme, dtype)
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(self.scheme.apply(self, x))


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, scheme: QuantScheme, dtype: torch.dtype) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.dtype = vocab_size, hidden_size, dtype
        self.scheme = scheme
        scheme.params(self, hidden_size, vocab_size, False, dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.scheme.rows(self, token_ids)  # [T, hidden]


class LMHead(nn.Module):
    """Computes logits for the whole vocabulary. A tied head has no matrix of its own, and uses the embedding's."""

    def __init__(self, embedding: Embedding, tied: bool, scheme: QuantScheme, comm: Comm) -> None:
        super().__init__()
        self.scheme = scheme
        self.tied = embedding if tied else None
        self.comm = comm
        if not tied:
            scheme.params(self, embedding.hidden_size, embedding.vocab_size, False, embedding.dtype)

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns logits [S, vocab] of hidden states [S, hidden], in `out` if that is given."""
        return self.comm.all_gather(self.matrix.scheme.apply(self.matrix, hidden, out))

    @property
    def matrix(self) -> "LMHead | Embedding":
        """The module that has the weights."""
        return self if self.tied is None else self.tied


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds x, the result of the last sub-layer, to the residual stream. Returns the normed sum and the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class MLP(nn.Module):
    """The SwiGLU MLP: down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, hidden_size: int, size: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype, comm: Comm) -> None:
        super().__init__()
        self.gate_up = MergedLinear(hidden_size, {"gate": size, "up": size}, bias, scheme, dtype)
        self.down = RowParallelLinear(size, hidden_size, bias, scheme, dtype, comm)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate_up.scheme.gated(self.gate_up, x))
        return out
