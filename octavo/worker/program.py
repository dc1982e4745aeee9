"""The program seam: how a model is run over a batch. Choosing one is the only branch in the runner."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Forward:
    """What a batch came to."""

    states: Tensor  # [T, size]: hidden states after the final norm, if the batch is whole; else finite where what is in the caches is
    logits: Tensor  # [S, vocab] float32, of the tokens to sample from
    best: Tensor | None = None  # [S] int64: the argmax of each row of logits, where the program has found it already
    sampled: Tensor | None = None  # [S, hidden]: hidden states of the tokens to sample from, where `states` are none


class Program(Protocol):
    vocab_size: int

    @property
    def nbytes(self) -> int:
        """What the weights take."""

    def run(self, batch: ForwardBatch) -> Forward: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab] float32"""


class Eager:
    """Layer by layer, op by op: the readable one."""

    def __init__(self, model: Decoder, backend: type[AttentionBackend]) -> None:
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._backend = backend

    @property
    def nbytes(self) -> int:
        return self._model.nbytes

    def run(self, batch: ForwardBatch) -> Forward:
        batch.attention = self._backend.prepare(batch)
        if batch.whole or len(batch.sample_index) == len(batch.token_ids):
            hidden: Tensor = self._model(batch)
            return Forward(hidden, self.logits(hidden[batch.sample_index]))
        sampled, mixed = self._model.sampled(batch)
        return Forward(mixed, self.logits(sampled), sampled=sampled)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)
