"""The parts of a layer around its mixer: matrices over a quantisation scheme, and norms.

    Linear             y = x W^T + b
    MergedLinear       several projections of one x as one product; each is a named slice of the rows of W
    RowParallelLinear  its input may be split over ranks, whose results are summed
    Embedding, LMHead  the first and the last matrix of a model, which may be the same; ranks share the vocabulary
    RMSNorm, LayerNorm the norm before or after a sub-layer

    qkv.weight   [ q: heads * head_dim rows | k: kv_heads * head_dim | v: kv_heads * head_dim ]
"""

from itertools import accumulate

import torch
from torch import Tensor, nn

from octavo.comm.comm import Comm
from octavo.kernels.ops import add_layer_norm, add_rms_norm, invariant_add_norm, layer_norm, rms_norm, scale_logits
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
        return self.comm.all_reduce(self.of_rank(x))

    def of_rank(self, x: Tensor) -> Tensor:
        """Returns the product with this rank's columns, which is not summed over ranks yet."""
        return self.scheme.apply(self, x)


class Embedding(nn.Module):
    def __init__(
        self, tokens: range, hidden_size: int, scheme: QuantScheme, dtype: torch.dtype, comm: Comm, scale: float = 1.0
    ) -> None:
        """`tokens`: whose rows this rank has; `scale`: factor on the rows, rounded to the dtype as in the original model"""
        super().__init__()
        self.scale = float(torch.tensor(scale, dtype=dtype, device="cpu"))
        self.tokens, self.hidden_size, self.dtype = tokens, hidden_size, dtype
        self.scheme, self.comm = scheme, comm
        scheme.params(self, hidden_size, len(tokens), False, dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self.scheme.rows(self, token_ids) if self.comm.size == 1 else self._of_ranks(token_ids)  # [T, hidden]
        return rows if self.scale == 1 else rows * self.scale

    def _of_ranks(self, token_ids: Tensor) -> Tensor:
        """One rank has the row of a token, and the others add zeros."""
        index = token_ids - self.tokens.start
        elsewhere = (index < 0) | (index >= len(self.tokens))
        rows = self.scheme.rows(self, index.masked_fill(elsewhere, 0))
        return self.comm.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class LMHead(nn.Module):
    """Computes logits for this rank's tokens. A tied head has no matrix and uses the embedding's."""

    def __init__(self, embedding: Embedding, tied: bool, scheme: QuantScheme, scale: float = 1.0, cap: float | None = None) -> None:
        """`scale`, `cap`: of the logits, as in `ModelDescription`"""
        super().__init__()
        self.scheme, self.scale, self.cap = scheme, scale, cap
        self.tied = embedding if tied else None
        if not tied:
            scheme.params(self, embedding.hidden_size, len(embedding.tokens), False, embedding.dtype)

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns logits [S, tokens of this rank] of hidden states [S, hidden], in `out` if given."""
        logits = self.matrix.scheme.apply(self.matrix, hidden, out)
        return logits if self.scale == 1 and self.cap is None else scale_logits(logits, self.scale, self.cap)

    @property
    def matrix(self) -> "LMHead | Embedding":
        """The module that has the weights."""
        return self if self.tied is None else self.tied


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps
        self.invariant = False  # on a GPU: sums have the order of those in fused products

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds x, the result of the last sub-layer, to the residual stream. Returns the normed sum and the sum."""
        return (invariant_add_norm if self.invariant else add_rms_norm)(x, residual, self.weight, self.eps)

    def alone(self, x: Tensor) -> Tensor:
        """Returns x normed, without the stream: the output of a sub-layer before it is added."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.bias = empty_parameter(size, dtype=dtype) if bias else None
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds x to the residual stream. Returns the normed sum and the sum."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def alone(self, x: Tensor) -> Tensor:
        """Returns x normed, without the stream."""
        return layer_norm(x, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm
