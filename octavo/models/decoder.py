"""The shell every decoder shares: embed, layers over a residual stream, final norm, logits.

A layer is called as `layer(x, residual, batch) -> (x, residual)`: x is what the last sub-layer adds to the stream, and is
added by the next norm. How it orders norms, mixer and MLP is its own business. Its second method, `sampled`, is for the last
layer: after the mixer each token is by itself, so that only the tokens to sample from have to go through the rest.
The batch that a layer gets is that of its cache group, so that no layer has to know of groups.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.forward_batch import ForwardBatch
from octavo.layers.comm import Comm
from octavo.layers.linear import Embedding, LMHead
from octavo.model_config import ModelConfig
from octavo.policy.split import vocabulary_rows
from octavo.policy.stages import Stage
from octavo.quant.schemes import QuantScheme


@dataclass(frozen=True, slots=True)
class Scales:
    """What the stream is multiplied by where it begins, and the logits where it ends (`ModelDescription`)."""

    embedding: float = 1.0
    logits: float = 1.0
    logit_cap: float | None = None


PLAIN = Scales()


class Decoder(nn.Module):
    def __init__(
        self, config: ModelConfig, layers: Iterable[nn.Module], norm: nn.Module, scheme: QuantScheme, dtype: torch.dtype, comm: Comm,
        scales: Scales = PLAIN,
    ) -> None:  # fmt: skip
        """`config`: of the rank, where the model is split over several (`models/registry.py`: rank_config)."""
        super().__init__()
        self.config, self.dtype, self.comm = config, dtype, comm
        self.tokens = vocabulary_rows(config.vocab_size, comm.size, comm.rank)  # whose logits it computes
        self.embed = Embedding(self.tokens, config.hidden_size, scheme, dtype, comm, scales.embedding)
        self.layers = nn.ModuleList(layers)
        self._numbers = {layer: number for number, layer in enumerate(self.layers)}
        self.norm = norm
        self.head = LMHead(self.embed, config.tie_embeddings, scheme, scales.logits, scales.logit_cap)

    def keep(self, stage: Stage) -> None:
        """Drops what other stages of a pipeline have. A tied head keeps the embedding's matrix."""
        if not stage.last:
            del self.norm, self.head
        if not stage.first and not (stage.last and self.config.tie_embeddings):
            del self.embed

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def nbytes(self) -> int:
        """What the weights take."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def forward(self, batch: ForwardBatch, layers: Iterable[nn.Module] | None = None) -> Tensor:
        """Returns hidden states of all tokens [T, hidden]. `layers`: all, if not given."""
        hidden: Tensor = self.norm(*self._through(self.layers if layers is None else layers, batch))[0]
        return hidden

    def sampled(self, batch: ForwardBatch, layers: Iterable[nn.Module] | None = None) -> tuple[Tensor, Tensor]:
        """Returns hidden states of the tokens to sample from [S, hidden], and what the last mixer gave every token [T, size].

        The second is finite only where the values are that a token leaves in the caches.
        """
        last: Any
        *before, last = self.layers if layers is None else layers
        x, residual, mixed = last.sampled(*self._through(before, batch), batch.of_layer(self._numbers[last]))
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden, mixed

    def stream(self, batch: ForwardBatch, layers: Iterable[nn.Module] | None = None) -> Tensor:
        """Returns the residual stream after the layers, for the next stage of a pipeline [T, hidden]."""
        x, residual = self._through(self.layers if layers is None else layers, batch)
        return x + residual

    def _through(self, layers: Iterable[nn.Module], batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x = self.embed(batch.token_ids) if batch.stream is None else batch.stream
        residual = torch.zeros_like(x)
        for layer in layers:
            x, residual = layer(x, residual, batch.of_layer(self._numbers[layer]))
        return x, residual
