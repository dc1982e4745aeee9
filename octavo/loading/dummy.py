"""Random weights of a plausible size, for trying out shapes: the same for the same seed, and made as they are asked for."""

from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from octavo.loading.loader import weight_targets
from octavo.models.decoder import Decoder
from octavo.quant.packed import PackedWeight

STD = 0.02
CPU = torch.device("cpu")
POOL = 4_000_037  # values drawn; a prime, so that repeats never line up with the rows of a matrix


class DummyCheckpoint:
    """Whatever weights `model` wants, which may be one without memory. Norms are ones."""

    source = "dummy weights"

    def __init__(self, model: Decoder, seed: int, device: torch.device = CPU) -> None:
        self._seed = seed
        self._shapes = {name: tuple(target.values.shape) for name, target in weight_targets(model).items()}
        starts = accumulate((prod(shape) for shape in self._shapes.values()), initial=0)
        self._start = {name: start % POOL for name, start in zip(self._shapes, starts)}
        self._pool = torch.randn(POOL, generator=torch.Generator().manual_seed(seed % 2**63)).mul_(STD).to(device)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """The pool over and over, from where the weight before it ended."""
        shape, start = self._shapes[name], self._start[name]
        if "norm" in name:
            return torch.ones(shape)
        pieces, left = [], prod(shape)
        while left:
            pieces.append(self._pool[start : start + left])
            left, start = left - len(pieces[-1]), 0
        return torch.cat(pieces).view(shape)

    def packed(self, name: str) -> PackedWeight | None:
        return None

    def fingerprint(self) -> bytes:
        return b"dummy%d" % self._seed
