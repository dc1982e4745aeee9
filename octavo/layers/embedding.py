"""The embedding and the head of a model, which may share one matrix."""

import torch
from torch import Tensor, nn

from octavo.layers.comm import Comm
from octavo.quant.base import QuantScheme


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
