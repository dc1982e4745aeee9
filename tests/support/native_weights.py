"""Random weights of every kind, packed for the native products if there is a library, and the same product in plain numpy.

What a kernel rounds its numbers to is part of what it is, so the twin rounds alike and little tolerance is left:

    form of x     codes      8 bits and a scale for each span of up to 32 k: weights in codes
                  floats     as they are, as are the weights
                  bf16       bfloat16, as are the weights
                  halves     float16 with a scale for each span, as are the weights; sums are, too, over a span
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from octavo.kernels.cpu import packing
from octavo.kernels.cpu.attention_case import from_bf16, norm_struct, to_bf16
from octavo.kernels.cpu.library import BF16, F16, F32, Q4, Q8, NativeLibrary, Norm
from octavo.kernels.cpu.packing import Floats, PackedMatrix, pack_codes, pack_float
from octavo.kernels.reference.layer import rms_norm

FEW_ROWS = 16  # up to here the ARM levels read codes in place, and unpack them for more rows
SPAN = 32  # columns of x that share a scale, at most

TOLERANCE = {"codes": 1e-5, "floats": 1e-5, "bf16": 1e-5, "halves": 1e-5}  # by form, of the largest result of a product


@dataclass
class NormWeights:
    weight: Floats
    bias: Floats | None = None
    kind: str = "rms"
    eps: float = 1e-6

    @property
    def struct(self) -> Norm:
        """Points to the arrays."""
        return norm_struct(self.weight, self.bias, self.kind, self.eps)

    def twin(self, x: Floats) -> Floats:
        numbers, weight = torch.from_numpy(x), torch.from_numpy(self.weight)
        bias = torch.zeros_like(weight) if self.bias is None else torch.from_numpy(self.bias)
        if self.kind == "layer":
            return F.layer_norm(numbers, weight.shape, weight, bias, self.eps).numpy()
        return (rms_norm(numbers, weight, self.eps) + bias).numpy()


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
    table: NDArray[np.uint8] | None = None

    def product(self, x: Floats, form: str) -> Floats:
        if self.order is not None:
            x = x[:, self.order]
        if form == "halves":
            return self._product_in_halves(x)
        weights = self.exact
        if form == "bf16" or self.kind == BF16:
            weights = from_bf16(to_bf16(weights))
        if self.kind == F16:
            weights = weights.astype(np.float16).astype(np.float32)
        if form == "bf16":
            x = from_bf16(to_bf16(x))
        elif form == "codes":
            x = eight_bits(x, min(SPAN, self.group))
        y = x.astype(np.float64) @ weights.T.astype(np.float64)
        return (y + (0 if self.bias is None else self.bias)).astype(np.float32)

    def _product_in_halves(self, x: Floats) -> Floats:
        """Every sum is rounded to float16, one k after the other; after a span it is multiplied by the scale of x there."""
        factor = packing._half_factor(self.exact)
        weights = (self.exact / np.float32(factor)).astype(np.float16)
        spans = np.pad(weights, ((0, 0), (0, -weights.shape[1] % SPAN))).reshape(len(weights), -1, SPAN).astype(np.float64)
        numbers = np.pad(x, ((0, 0), (0, -x.shape[1] % SPAN))).reshape(len(x), -1, SPAN)
        scale = power_above(np.abs(numbers).max(-1))
        halves = (numbers / scale[..., None]).astype(np.float16).astype(np.float64)
        y = np.zeros((len(x), len(weights)))
        for i in range(halves.shape[1]):
            total = np.zeros(y.shape, np.float16)
            for k in range(SPAN):
                total = (total + halves[:, i, k, None] * spans[:, i, k]).astype(np.float16)
            y += total * scale[:, i, None].astype(np.float64)
        return (y * factor + (0 if self.bias is None else self.bias)).astype(np.float32)


def power_above(numbers: Any) -> Any:
    """The least power of two that is not below."""
    return np.exp2(np.ceil(np.log2(np.maximum(numbers, np.float32(2.0**-125)))))


def gated(both: Floats, activation: str = "swiglu") -> Floats:
    """What gates make of a product whose columns are 16 of gate, 16 of up, in turn: [rows, n] -> [rows, n / 2]. "gelu" has no gate"""
    if activation == "gelu":
        return F.gelu(torch.from_numpy(both).double(), approximate="tanh").float().numpy()
    parts = torch.from_numpy(both).double().view(len(both), -1, 2, 16)
    gate, up = parts[:, :, 0].flatten(1), parts[:, :, 1].flatten(1)
    if activation == "swiglu":
        return (F.silu(gate) * up).float().numpy()
    if activation == "geglu":
        return (F.gelu(gate, approximate="tanh") * up).float().numpy()
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).float().numpy()


def form_of(level: str, kind: int) -> str:
    """How a level multiplies, however many rows there are."""
    if kind in (Q8, Q4):
        return "codes"
    if kind == F32 or (kind == BF16 and level == "neon"):
        return "floats"
    if level in ("avx512bf16", "amx", "i8mm") and kind != F16:
        return "bf16"
    return "halves" if level in ("neon", "i8mm") else "floats"


def eight_bits(x: Floats, group: int) -> Floats:
    rows, k = x.shape
    groups = np.pad(x, ((0, 0), (0, -k % group))).reshape(rows, -1, group)
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / np.maximum(largest, np.float32(1e-30))))
    return (codes * (largest / np.float32(127))).reshape(rows, -1)[:, :k]


def make_weights(
    library: NativeLibrary | None, random: np.random.Generator, n: int, k: int, kind: int, group: int, plain: bool = False,
    tabled: bool = False,
) -> Weights:  # fmt: skip
    """Not plain: with a bias and columns in another order. Tabled: codes of 4 bits stand for numbers of 8 bits"""
    bias = None if plain else random.standard_normal(n, np.float32)
    order = None if plain else random.permutation(k).astype(np.int32)
    if kind in (F32, BF16, F16):
        weights = random.standard_normal((n, k), np.float32)
        packed = None if library is None else pack_float(library, weights, kind, bias, order)
        return Weights(packed, weights, kind, 0, bias, order, {"values": weights})
    codes: NDArray[Any] = random.integers(0, 256 if kind == Q8 else 16, (n, k), np.uint8)
    shape = (n, -(-k // group))
    scale, offset = (random.standard_normal(shape).astype(np.float16) for _ in range(2))
    scale /= np.float16(255 if kind == Q8 or tabled else 15)
    factor = 1.0 if plain else 0.75
    table: NDArray[Any] | None = random.integers(0, 256, 16, np.uint8) if tabled else None
    spread = [np.repeat(part.astype(np.float64), group, axis=1)[:, :k] for part in (scale, offset)]
    exact = (((codes if table is None else table[codes]) * spread[0] + spread[1]) * factor).astype(np.float32)
    packed = None if library is None else pack_codes(library, codes, scale, offset, group, kind, factor, bias, order, table=table)
    return Weights(packed, exact, kind, group, bias, order, {"codes": codes, "scale": scale, "offset": offset}, factor, table)
