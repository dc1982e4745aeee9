"""Token ids in, logits out: the two ends of a model, which may share one matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers.comm import Comm
from octavo.quant.base import empty_parameter


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)  # [T, hidden]


class LMHead(nn.Module):
    """Logits of every token of the vocabulary. Tied, its weight is the embedding's: one parameter under two names."""

    def __init__(self, embedding: Embedding, tied: bool, comm: Comm) -> None:
        super().__init__()
        self.weight = embedding.weight if tied else empty_parameter(*embedding.weight.shape, dtype=embedding.weight.dtype)
        self.comm = comm

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[S, hidden] -> [S, vocab], in `out` if that is given."""
        return self.comm.all_gather(F.linear(hidden, self.weight) if out is None else torch.mm(hidden, self.weight.t(), out=out))
