"""The shell every decoder shares: embed, layers over a residual stream, final norm, logits.

A layer is called as `layer(x, residual, batch) -> (x, residual)`: x is what the last sub-layer adds to the stream, and is
added by the next norm. It has two halves: in `attend` tokens look at each other, in `after` each is by itself. So the tokens
that are sampled from can go through the second half of the last layer alone.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.attention.forward_batch import ForwardBatch
from octavo.layers.comm import Comm
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.norm import RMSNorm
from octavo.model_config import ModelConfig
from octavo.quant.base import QuantScheme


class Decoder(nn.Module):
    # Module of the checkpoint -> (module here, named part of it); `*` is the number of a layer.
    RULES: ClassVar[dict[str, tuple[str, str | None]]]

    def __init__(self, config: ModelConfig, layers: Iterable[nn.Module], scheme: QuantScheme, dtype: torch.dtype, comm: Comm) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, scheme, dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.head = LMHead(self.embed, config.tie_embeddings, scheme, comm)

    @property
    def nbytes(self) -> int:
        """What the weights take."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def forward(self, batch: ForwardBatch, layers: Iterable[nn.Module] | None = None) -> Tensor:
        """Hidden states of all tokens [T, hidden]. `layers`: all, if not said."""
        hidden: Tensor = self.norm(*self._through(self.layers if layers is None else layers, batch))[0]
        return hidden

    def sampled(self, batch: ForwardBatch, layers: Iterable[nn.Module] | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states of the tokens to sample from [S, hidden], and what attention of the last layer gave every token [T, size].

        The second is finite only where the keys and values that a token leaves in the caches are.
        """
        last: Any
        *before, last = self.layers if layers is None else layers
        mixed, residual = last.attend(*self._through(before, batch), batch)
        index = batch.sample_index
        hidden: Tensor = self.norm(*last.after(mixed.index_select(0, index), residual.index_select(0, index)))[0]
        return hidden, mixed

    def _through(self, layers: Iterable[nn.Module], batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x = self.embed(batch.token_ids)
        residual = torch.zeros_like(x)
        for layer in layers:
            x, residual = layer(x, residual, batch)
        return x, residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of the tokens to sample from [S, hidden] -> [S, vocab] float32."""
        logits: Tensor = self.head(hidden)
        return logits.float()
