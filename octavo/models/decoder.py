"""The common part of every decoder: embedding, layers over a residual stream, final norm, logits.

A layer is called as `layer(x, residual, batch) -> (x, residual)`: x is the output of the last sub-layer, which the
next norm adds to the stream. A layer decides the order of its norms, mixer and MLP. Its second method, `sampled`, is for the last
layer: after the mixer tokens are independent, so only the tokens to sample from need the rest.
The batch that a layer receives is that of its cache group, so layers do not depend on groups.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.forward_batch import ForwardBatch
from octavo.comm.comm import Comm
from octavo.layers.linear import Embedding, LMHead, Norm
from octavo.model_config import ModelConfig
from octavo.models.split import vocabulary_rows
from octavo.models.stages import Stage
from octavo.quant.schemes import QuantScheme


@dataclass(frozen=True, slots=True)
class Scales:
    """The factors of the embedding and of the logits (`ModelDescription`)."""

    embedding: float = 1.0
    logits: float = 1.0
    logit_cap: float | None = None


PLAIN = Scales()


class Decoder(nn.Module):
    def __init__(
        self, config: ModelConfig, layers: Iterable[nn.Module], norm: nn.Module, scheme: QuantScheme, dtype: torch.dtype, comm: Comm,
        scales: Scales = PLAIN, embedding_norm: Norm | None = None,
    ) -> None:  # fmt: skip
        """`config`: of the rank, if the model is split over several (`models/registry.py`: rank_config)."""
        super().__init__()
        self.config, self.dtype, self.comm = config, dtype, comm
        self.tokens = vocabulary_rows(config.vocab_size, comm.size, comm.rank)  # the tokens whose logits it computes
        self.embed = Embedding(self.tokens, config.hidden_size, scheme, dtype, comm, scales.embedding)
        self.embedding_norm = embedding_norm
        self.layers = nn.ModuleList(layers)
        self._numbers = {layer: number for number, layer in enumerate(self.layers)}
        self.norm = norm
        self.head = LMHead(self.embed, config.tie_embeddings, scheme, scales.logits, scales.logit_cap)

    def keep(self, stage: Stage) -> None:
        """Removes the parts of other pipeline stages. A tied head keeps the embedding's matrix."""
        if not stage.last:
            del self.norm, self.head
        if not stage.first and not (stage.last and self.config.tie_embeddings):
            del self.embed
        if not stage.first:
            self.embedding_norm = None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def nbytes(self) -> int:
        """The bytes of the weights."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def forward(self, batch: ForwardBatch, layers: Iterable[nn.Module] | None = None) -> Tensor:
        """Returns hidden states of all tokens [T, hidden]. `layers`: all by default."""
        hidden: Tensor = self.norm(*self._through(self.layers if layers is None else layers, batch))[0]
        return hidden

    def sampled(self, batch: ForwardBatch, layers: Iterable[nn.Module] | None = None) -> tuple[Tensor, Tensor]:
        """Returns hidden states of the tokens to sample from [S, hidden], and the last mixer's output for every token [T, size].

        The second is finite only if the values that a token stores in the caches are.
        """
        last: Any
        *before, last = self.layers if layers is None else layers
        x, residual, mixed = last.sampled(*self._through(before, batch), batch.of_layer(self._numbers[last]))
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden, mixed

    def stream(self, batch: ForwardBatch, layers: Iterable[nn.Module] | None = None) -> Tensor:
        """Returns the residual stream after the layers [T, hidden], for the next stage of a pipeline."""
        x, residual = self._through(self.layers if layers is None else layers, batch)
        return x + residual

    def _through(self, layers: Iterable[nn.Module], batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x = self._embedded(batch.token_ids) if batch.stream is None else batch.stream
        residual = torch.zeros_like(x)
        for layer in layers:
            x, residual = layer(x, residual, batch.of_layer(self._numbers[layer]))
        return x, residual

    def _embedded(self, token_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(token_ids)
        return x if self.embedding_norm is None else self.embedding_norm.alone(x)
