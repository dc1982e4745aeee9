"""A checkpoint as the setting `quantization` wants it, whatever its file holds.

    auto          as it is: codes stay codes, floats stay floats
    none          floats: codes are dequantised
    int8, int4    codes of 8 or 4 bits in every matrix of a product (`policy/model_size.py` says which); codes of the file are
                  dequantised first, so that what their makers rounded is rounded once more

This does not depend on the program that computes: the native one and a GPU keep the codes, torch gets the numbers they stand for.
A GPU has larger groups. Floats become codes on the device that will hold them. Dummy weights are drawn as codes at once.
"""

import torch
from torch import Tensor

from octavo.config import Quantization
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.dummy import CPU, DummyCheckpoint
from octavo.model_config import ModelConfig
from octavo.models.registry import describe
from octavo.policy.description import ModelDescription
from octavo.policy.model_size import Codes, requantised
from octavo.quant.packed import PackedWeight, quantize


def as_wanted(
    checkpoint: Checkpoint, quantization: Quantization, config: ModelConfig, device: torch.device = CPU, form: str = "cpu"
) -> Checkpoint:
    """`form`: for which device the codes are made, cpu or cuda."""
    return checkpoint if quantization == "auto" else Requantized(checkpoint, quantization, describe(config), device, form)


class Requantized:
    def __init__(
        self, stored: Checkpoint, quantization: Quantization, model: ModelDescription, device: torch.device, form: str
    ) -> None:
        self.source = stored.source
        self._stored = stored
        self._quantization = quantization
        self._matrices = {part: matrix for matrix in model.matrices for part in matrix.parts}
        self._device = device
        self._form = form

    def names(self) -> list[str]:
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name)

    def read(self, name: str) -> Tensor:
        packed = self.packed(name)
        return self._stored.read(name) if packed is None else packed.dequantize()

    def packed(self, name: str) -> PackedWeight | None:
        wanted = self._codes(name)
        if wanted is None:
            return None
        if isinstance(self._stored, DummyCheckpoint):
            return self._stored.draw(name, wanted)
        return quantize(self._stored.read(name).to(self._device), wanted.bits, wanted.group, f"{self.source}: {name}")

    def _codes(self, name: str) -> Codes | None:
        if self._quantization == "none" or name not in self._matrices:
            return None
        return requantised(self._matrices[name], self._quantization, self._form)

    def fingerprint(self) -> bytes:
        return self._stored.fingerprint()
