"""Packs weights into the panels of the native program, matrix by matrix, so that no dense copy of a model is ever held.

Quantised parts stay codes. Parts that make up one matrix (q, k, v) must be of one kind: codes take the most bits and the
smallest group of any; where one of them is no code, or orders its columns in another way, all of them become floats.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.cpu.library import BF16, F16, F32, PANEL, Q4, Q8, NativeLibrary
from octavo.kernels.cpu.packing import PackedMatrix, pack_codes, pack_float
from octavo.layers.linear import MergedLinear
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.loader import check_weights
from octavo.models.decoder import Decoder
from octavo.quant.packed import PackedWeight, concatenate, mergeable


class StoredParameters:
    """Reads a model's parameters from a checkpoint by their names in the model. Parts of one matrix are joined.

    The model itself needs no memory.
    """

    def __init__(self, model: Decoder, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._modules = dict(model.named_modules())
        self._stored = {target.label: name for name, target in check_weights(model, checkpoint).items()}

    def has(self, name: str) -> bool:
        return all(label in self._stored for label in self._labels(name))

    def shape(self, name: str) -> tuple[int, ...]:
        parts = [self.checkpoint.shape(self._stored[label]) for label in self._labels(name)]
        return (sum(part[0] for part in parts), *parts[0][1:])

    def floats(self, name: str) -> Tensor:
        """Returns floats that may be a view of the file: copy them to keep them."""
        parts = [self.checkpoint.read(self._stored[label]).float() for label in self._labels(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy(self, name: str, target: Tensor) -> None:
        """Copies a parameter, part by part, into the rows of a tensor on any device."""
        sizes = [self.checkpoint.shape(self._stored[label])[0] for label in self._labels(name)]
        for label, rows in zip(self._labels(name), target.split(sizes), strict=True):
            rows.copy_(self.checkpoint.read(self._stored[label]))

    def codes(self, name: str) -> PackedWeight | None:
        parts = [self.checkpoint.packed(self._stored[label]) for label in self._labels(name)]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or not mergeable(found):
            return None
        return found[0] if len(found) == 1 else concatenate(found)

    def _labels(self, name: str) -> list[str]:
        module = self._modules.get(name.rpartition(".")[0])
        return [f"{name}[{part}]" for part in module.parts] if isinstance(module, MergedLinear) else [name]


class NativeWeights:
    def __init__(self, parameters: StoredParameters, library: NativeLibrary, dtype: str) -> None:
        """`dtype`: for weights that are not stored as codes."""
        self._parameters = parameters
        self._library = library
        self._kind, self._dtype = {"float32": F32, "bfloat16": BF16, "float16": F16}[dtype], getattr(torch, dtype)

    def vector(self, name: str) -> NDArray[np.float32]:
        return np.array(self._parameters.floats(name).numpy())

    def rows(self, name: str) -> Tensor:
        """Returns a matrix as it is, to look rows up in."""
        return self._parameters.floats(name).to(self._dtype, copy=True).contiguous()

    def matrix(self, module: str, alternate: bool = False, columns: int = 0) -> PackedMatrix:
        """Returns the weights of a product, with zeros up to `columns`. With `alternate`, 16 rows of each half follow in turn."""
        name, bias = f"{module}.weight", f"{module}.bias"
        weight = self._parameters.codes(name) or self._wide(name, columns)
        order = _alternating(weight.shape[0] // 2) if alternate else None
        biases = np.array(_taken(self._parameters.floats(bias), order)) if self._parameters.has(bias) else None
        if isinstance(weight, Tensor):
            return pack_float(self._library, _taken(weight, order), self._kind, biases)
        return self._pack_codes(weight, biases, None if order is None else order.numpy())

    def _wide(self, name: str, columns: int) -> Tensor:
        floats = self._parameters.floats(name)
        return F.pad(floats, (0, columns - floats.shape[1])) if columns > floats.shape[1] else floats

    def _pack_codes(self, weight: PackedWeight, bias: NDArray[np.float32] | None, rows: NDArray[np.int64] | None) -> PackedMatrix:
        codes, scale, offset = (tensor.contiguous().numpy() for tensor in (weight.codes, weight.scale, weight.offset))
        order, kind = None if weight.order is None else weight.order.numpy(), Q4 if weight.bits == 4 else Q8
        return pack_codes(self._library, codes, scale, offset, weight.group, kind, weight.factor, bias, order, rows)


def _alternating(size: int) -> Tensor:
    """Returns the order in which 16 rows of each of two halves of `size` follow each other; -1 is a row of zeros."""
    index = torch.full((-(-size // PANEL) * PANEL,), -1)
    index[:size] = torch.arange(size)
    panels = index.view(-1, 1, PANEL)
    return torch.cat([panels, torch.where(panels < 0, -1, panels + size)], dim=1).flatten()


def _taken(values: Tensor, order: Tensor | None) -> NDArray[np.float32]:
    """Returns the rows in that order, with zeros where it has -1."""
    if order is None:
        return values.contiguous().numpy()
    taken = values[order.clamp(min=0)]
    taken[order < 0] = 0
    return taken.numpy()
