"""Random weights of every kind, packed for the native products if there is a library, and the same product in plain numpy.

What a kernel rounds its numbers to is part of what it is, so the twin rounds alike and little tolerance is left:

    form of x     codes      8 bits and a scale for each group of k: few rows, or a CPU that does not multiply bfloat16
                  halves     bfloat16, as are the weights: many rows
                  floats     as they are
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.cpu.attention_case import from_bf16, to_bf16
from octavo.kernels.cpu.library import BF16, F32, Q4, Q8, NativeLibrary
from octavo.kernels.cpu.packing import Floats, PackedMatrix, pack_codes, pack_float


@dataclass
class Weights:
    packed: PackedMatrix | None  # None: made without a library
    exact: Floats  # [n, k] as the format says
    kind: int
    group: int
    bias: Floats | None
    order: NDArray[np.int32] | None
    source: dict[str, NDArray[Any]]  # what is packed: `values`, or `codes`, `scale` and `offset`
    factor: float = 1.0

    def product(self, x: Floats, halves: bool) -> Floats:
        if self.order is not None:
            x = x[:, self.order]
        weights = self.exact
        if self.kind == BF16 or (halves and self.kind in (Q8, Q4)):
            weights, x = from_bf16(to_bf16(weights)), from_bf16(to_bf16(x))
        elif self.kind in (Q8, Q4):
            x = eight_bits(x, self.group)
        return self._multiplied(x, weights)

    def product_in_floats(self, x: Floats) -> Floats:
        weights = from_bf16(to_bf16(self.exact)) if self.kind == BF16 else self.exact
        return self._multiplied(x if self.order is None else x[:, self.order], weights)

    def _multiplied(self, x: Floats, weights: Floats) -> Floats:
        y = x.astype(np.float64) @ weights.T.astype(np.float64)
        return (y + (0 if self.bias is None else self.bias)).astype(np.float32)


def gated(both: Floats) -> Floats:
    """silu(gate) * up of a product whose columns are 16 of gate, 16 of up, in turn. [rows, n] -> [rows, n / 2]"""
    parts = both.astype(np.float64).reshape(len(both), -1, 2, 16)
    gate, up = parts[:, :, 0].reshape(len(both), -1), parts[:, :, 1].reshape(len(both), -1)
    return (gate / (1 + np.exp(-gate)) * up).astype(np.float32)


def eight_bits(x: Floats, group: int) -> Floats:
    rows, k = x.shape
    groups = np.pad(x, ((0, 0), (0, -k % group))).reshape(rows, -1, group)
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / np.maximum(largest, np.float32(1e-30))))
    return (codes * (largest / np.float32(127))).reshape(rows, -1)[:, :k]


def make_weights(
    library: NativeLibrary | None, random: np.random.Generator, n: int, k: int, kind: int, group: int, plain: bool = False
) -> Weights:
    """Not plain: with a bias and columns in another order."""
    bias = None if plain else random.standard_normal(n, np.float32)
    order = None if plain else random.permutation(k).astype(np.int32)
    if kind in (F32, BF16):
        weights = random.standard_normal((n, k), np.float32)
        packed = None if library is None else pack_float(library, weights, kind, bias, order)
        return Weights(packed, weights, kind, 0, bias, order, {"values": weights})
    codes: NDArray[Any] = random.integers(0, 256 if kind == Q8 else 16, (n, k), np.uint8)
    shape = (n, -(-k // group))
    scale, offset = (random.standard_normal(shape).astype(np.float16) for _ in range(2))
    scale /= np.float16(255 if kind == Q8 else 15)
    factor = 1.0 if plain else 0.75
    spread = [np.repeat(part.astype(np.float64), group, axis=1)[:, :k] for part in (scale, offset)]
    exact = ((codes * spread[0] + spread[1]) * factor).astype(np.float32)
    packed = None if library is None else pack_codes(library, codes, scale, offset, group, kind, factor, bias, order)
    return Weights(packed, exact, kind, group, bias, order, {"codes": codes, "scale": scale, "offset": offset}, factor)
