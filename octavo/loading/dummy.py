"""Random weights of a plausible size, for trying out shapes. They are the same for the same seed, and made when they are read.

They are floats, or codes of any kind: quantising billions of random numbers would only give other random numbers.
"""

from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from octavo.loading.loader import weight_targets
from octavo.models.decoder import Decoder
from octavo.policy.model_size import Codes
from octavo.quant.packed import PackedWeight

STD = 0.02
CPU = torch.device("cpu")
POOL = 4_000_037  # values drawn; a prime, so that repeats never line up with the rows of a matrix


class DummyCheckpoint:
    """Has every weight of `model`, which may be on the meta device. Norms are ones."""

    source = "dummy weights"

    def __init__(self, model: Decoder, seed: int, device: torch.device = CPU) -> None:
        self._seed = seed
        self._shapes = {name: tuple(target.values.shape) for name, target in weight_targets(model).items()}
        starts = accumulate((prod(shape) for shape in self._shapes.values()), initial=0)
        self._start = {name: start % POOL for name, start in zip(self._shapes, starts)}
        self._pool = torch.randn(POOL, generator=torch.Generator().manual_seed(seed % 2**63)).mul_(STD).to(device)

    @cached_property
    def _bytes(self) -> Tensor:
        dice = torch.Generator().manual_seed(self._seed % 2**63)
        return torch.randint(256, (POOL,), dtype=torch.uint8, generator=dice).to(self._pool.device)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        is_norm = len(shape) == 1 and name.endswith(".weight")
        return torch.ones(shape) if is_norm else self._taken(self._pool, name, prod(shape)).view(shape)

    def draw(self, name: str, codes: Codes) -> PackedWeight:
        """Returns a matrix of random codes. The scales of its groups differ by a factor of three at most."""
        n, k = self._shapes[name]
        most = 2**codes.bits - 1
        drawn = self._taken(self._bytes, name, n * k).view(n, k) & most
        spread = STD * (12 / ((most + 1) ** 2 - 1)) ** 0.5  # the scale that makes weights as large as the floats are
        scale = spread * (0.5 + self._taken(self._bytes, name, n * k // codes.group).view(n, -1) / 256)
        return PackedWeight(codes.bits, codes.group, drawn, scale.half(), (scale * (-most / 2)).half(), 1.0)

    def _taken(self, pool: Tensor, name: str, count: int) -> Tensor:
        """Returns numbers of the pool, which repeats, from where the weight before this one ended."""
        pieces, start = [], self._start[name]
        while count:
            pieces.append(pool[start : start + count])
            count, start = count - len(pieces[-1]), 0
        return torch.cat(pieces)

    def packed(self, name: str) -> PackedWeight | None:
        return None

    def fingerprint(self) -> bytes:
        return b"dummy%d" % self._seed
