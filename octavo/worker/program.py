"""The program seam: how a model is run over a batch. Choosing one is the only branch in the runner."""

from typing import Protocol

from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.models.decoder import Decoder


class Program(Protocol):
    def run(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states [T, hidden]."""


class Eager:
    """Layer by layer, op by op: the readable one."""

    def __init__(self, model: Decoder, backend: type[AttentionBackend]) -> None:
        self._model = model
        self._backend = backend

    def run(self, batch: ForwardBatch) -> Tensor:
        batch.attention = self._backend.prepare(batch)
        hidden: Tensor = self._model(batch)
        return hidden
