"""The one form of all weight-only formats: unsigned codes, with a scale and an offset for each group of input columns.

    w[row, order[j]] = (scale[row, j // group] * codes[row, j] + offset[row, j // group]) * factor

    codes           [n, k] uint8, one a byte here; each device repacks them once into the layout its kernels like
    scale, offset   [n, k / group] float16
    factor          a power of two for the whole matrix: as small as scales and offsets in float16 allow, so that the
                    smallest of them keep as many bits as they can. Whatever some power of two makes exact, this one does.
    order           [k] int32 or None: which input column each column of codes belongs to (act-order), None as they stand
    table           [16] uint8 or None: what stands for each code of 4 bits in the formula, for formats whose steps are not
                    equal (MXFP4, IQ4_NL). None: the code itself

`fold_gguf` and `zero_point.py` bring published formats into this form, and `quantize` makes it out of floats.
A scale or offset that float16 cannot hold is rounded by at most 2^-11 of itself, a quarter of what bfloat16 does to a weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.kernels.reference.dequant import QUANTISED, take_apart
from octavo.quant.quant_config import GROUPS

BITS = (4, 8)
LARGEST_HALF = 65504  # of float16


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    bits: int
    group: int
    codes: Tensor
    scale: Tensor
    offset: Tensor
    factor: float
    order: Tensor | None = None
    table: Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group not in GROUPS:
            raise LoadError(f"packed weight has {self.bits} bits in groups of {self.group}, supported: bits {BITS}, groups {GROUPS}")
        if self.codes.dim() != 2 or self.codes.shape[1] % self.group:
            raise LoadError(f"packed weight has codes {list(self.codes.shape)}, expected rows of whole groups of {self.group}")
        n, k = self.shape
        self._check("codes", self.codes, torch.uint8, n, k)
        self._check("scale", self.scale, torch.float16, n, k // self.group)
        self._check("offset", self.offset, torch.float16, n, k // self.group)
        if self.order is not None:
            self._check("order", self.order, torch.int32, k)
        if self.table is not None:
            self._check("table", self.table, torch.uint8, 16)
            if self.bits != 4:
                raise LoadError(f"packed weight has a table for codes of {self.bits} bits, supported: 4")

    def _check(self, field: str, value: Tensor, dtype: torch.dtype, *shape: int) -> None:
        if value.dtype != dtype or value.shape != shape:
            raise LoadError(f"packed weight has {field} {value.dtype} {list(value.shape)}, expected {dtype} {list(shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def nbytes(self) -> int:
        """The bytes that a device holds: codes at their own width, without padding."""
        beside = (self.scale, self.offset, *(part for part in (self.order, self.table) if part is not None))
        return self.codes.numel() * self.bits // 8 + sum(part.nbytes for part in beside)

    def dequantize(self) -> Tensor:
        """Returns the weights [n, k] in float32, with columns in their original order."""
        n, k = self.shape
        weights = self._values().view(n, k // self.group, self.group) * self.scale.float().unsqueeze(-1)  # [n, groups, group]
        weights = weights.add_(self.offset.float().unsqueeze(-1)).mul_(self.factor).view(n, k)
        return weights if self.order is None else torch.empty_like(weights).index_copy_(1, self.order.long(), weights)

    def rows(self, index: slice | Tensor) -> "PackedWeight":
        """Returns the rows that `index` names, in its order."""
        return replace(self, codes=self.codes[index], scale=self.scale[index], offset=self.offset[index])

    def without_table(self) -> "PackedWeight":
        """Returns the same weights in codes that stand for themselves: of 8 bits, if there was a table."""
        return self if self.table is None else replace(self, bits=8, codes=self._values(), table=None)

    def _values(self) -> Tensor:
        """Returns what stands for the codes, uint8 [n, k]."""
        return self.codes if self.table is None else self.table[self.codes.long()]


def pack(
    name: str, bits: int, codes: Tensor, scale: Tensor, offset: Tensor, order: Tensor | None = None, table: Tensor | None = None
) -> PackedWeight:
    """Returns the packed form of codes with scales and offsets in float32. `name`: of the tensor, for messages."""
    group = codes.shape[1] // max(1, scale.shape[1])
    factor = fitting_factor(name, scale, offset)
    return PackedWeight(bits, group, codes, (scale / factor).half(), (offset / factor).half(), factor, order, table)


def fitting_factor(name: str, scale: Tensor, offset: Tensor) -> float:
    """Returns the smallest power of two that brings all of them into the range of float16 when they are divided by it.

    It is at least 2^-100, so that float32 can hold the products.
    """
    most = [float(table.abs().max()) if table.numel() else 0.0 for table in (scale, offset)]
    if not all(math.isfinite(value) for value in most):
        raise LoadError(f"{name}: a scale or offset is not finite")
    digits, exponent = math.frexp(max(most))  # digits * 2^exponent, digits below 1
    return math.ldexp(1.0, max(exponent - (16 if digits <= LARGEST_HALF / 2**16 else 15), -100))


def mergeable(parts: Sequence[PackedWeight]) -> bool:
    """Whether the rows of all parts fit into one matrix: they need as many columns, in the same order (act-order may differ)."""
    first = parts[0]
    return all(part.shape[1] == first.shape[1] and _same(first.order, part.order) for part in parts)


def concatenate(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Returns one matrix with the rows of all parts, which must be mergeable. It has the most bits and the smallest group of any.

    Parts whose tables differ, or of which some have none, lose them, and have 8 bits. This is exact, except for scales and offsets that
    are 2^29 times smaller than the largest.
    """
    assert mergeable(parts)
    if not all(_same(parts[0].table, part.table) for part in parts):
        parts = [part.without_table() for part in parts]
    first = parts[0]
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    scale = torch.cat([_refine(part, part.scale, group) for part in parts])
    offset = torch.cat([_refine(part, part.offset, group) for part in parts])
    return pack("merged matrix", bits, torch.cat([part.codes for part in parts]), scale, offset, first.order, first.table)


def _refine(part: PackedWeight, table: Tensor, group: int) -> Tensor:
    """Returns the scales or offsets of a part in float32, one for each of the smaller groups."""
    return (table.float() * part.factor).repeat_interleave(part.group // group, dim=1)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


# -- GGUF's quantised kinds in the packed form
#
#     exact (scales below 512)  Q4_0 Q4_1 -> 4 bits    Q5_0 Q5_1 Q8_0 -> 8 bits           groups of 32
#     scales to 11 bits         Q2_K Q3_K -> 4 bits    Q6_K -> 8 bits                     groups of 16
#                               Q4_K      -> 4 bits    Q5_K -> 8 bits                     groups of 32
#
# A scale of a K kind is a float16 times an integer of up to 7 bits; in float16 it is off by at most 2^-11 of itself. Where codes
# are counted from a middle (Q3_K, Q6_K), so is each weight; in the others it is off by at most 2^-11 of |scale * code| + |offset|.

_FOUR_BITS = ("Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K")


def fold_gguf(raw: Tensor, kind: str, shape: tuple[int, ...], name: str) -> PackedWeight:
    """Returns the matrix of `shape` whose bytes are `raw` (uint8, contiguous). `name`: of the tensor in the file, for messages."""
    _check_gguf(raw, kind, shape, name)
    codes, middle, scale, offset = take_apart(raw, kind)
    if offset is None:
        offset = scale * -middle  # by a power of two: rounds as the scale does
    n = shape[0]
    return pack(name, 4 if kind in _FOUR_BITS else 8, codes.view(shape), scale.view(n, -1), offset.view(n, -1))


def _check_gguf(raw: Tensor, kind: str, shape: tuple[int, ...], name: str) -> None:
    if kind not in QUANTISED:
        raise LoadError(f"{name}: {kind} has no packed form; supported: {', '.join(QUANTISED)}")
    group, group_bytes = 256 if kind.endswith("_K") else 32, QUANTISED[kind][0]
    if len(shape) != 2 or shape[1] % group or raw.numel() * group != shape[0] * shape[1] * group_bytes:
        raise LoadError(f"{name}: {raw.numel()} bytes of {kind} are no matrix {list(shape)}, with {group_bytes} bytes for {group} columns")


# -- floats into the packed form, for models that come without quantised weights
#
#     8 bits   codes are counted from the middle. The largest weight of a group is 127 steps away from it; zero stays zero.
#     4 bits   15 steps lead from the lowest to the highest weight of a group. Then, twice: the line through (code, weight) with
#              the least squared error gives a better scale and offset, and those give better codes.
#
# Neither half of such a round can make the error larger. Two rounds take 8 to 12 % off it. That is more than a search over ranges
# that leave out the outermost weights gives, and it costs less.

ROUNDS = 2
CHUNK = 1 << 18  # weights at a time: what fits into a core's cache
GPU_CHUNKS = 16  # as many at once keep a GPU busy


def quantize(weight: Tensor, bits: int, group: int = 32, name: str = "weight") -> PackedWeight:
    """Returns the codes of a matrix [n, k] of any float dtype. `name`: of the tensor, for messages."""
    if bits not in BITS or group not in GROUPS:
        raise LoadError(f"{name}: {bits} bits in groups of {group} are not supported, only bits {BITS} and groups {GROUPS}")
    if weight.dim() != 2 or weight.shape[1] % group or not weight.numel():
        raise LoadError(f"{name} is {list(weight.shape)}, expected a matrix with rows of whole groups of {group}")
    n, k = weight.shape
    rows = max(1, CHUNK * (GPU_CHUNKS if weight.is_cuda else 1) // k)
    chunks = weight.reshape(n, k // group, group).split(rows)
    lines = [_line_4(chunk.float()) if bits == 4 else _line_8(chunk.float()) for chunk in chunks]
    scale = torch.cat([scale for scale, _ in lines])  # [n, groups, 1]
    offset = torch.cat([offset for _, offset in lines])
    factor = fitting_factor(name, scale, offset)
    scale, offset = (scale / factor).half(), (offset / factor).half()
    codes = torch.empty(n, k // group, group, dtype=torch.uint8, device=weight.device)
    kept = (scale.float() * factor, offset.float() * factor)  # codes are for what float16 kept
    for chunk, scales, offsets, out in zip(chunks, *(table.split(rows) for table in kept), codes.split(rows)):
        out.copy_(_codes(chunk.float(), scales, offsets, bits))
    return PackedWeight(bits, group, codes.view(n, k), scale.squeeze(-1), offset.squeeze(-1), factor)


def _codes(weights: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor:
    """Returns the nearest codes, as floats. A group whose scale is zero holds one number only, its offset."""
    steps = (weights - offset).div_(torch.where(scale == 0, 1, scale))
    return steps.round_().clamp_(0, 2**bits - 1)


def _line_8(weights: Tensor) -> tuple[Tensor, Tensor]:
    scale = weights.abs().amax(-1, keepdim=True) / 127
    return scale, scale * -128


def _line_4(weights: Tensor) -> tuple[Tensor, Tensor]:
    lowest = weights.amin(-1, keepdim=True)
    scale, offset = (weights.amax(-1, keepdim=True) - lowest) / 15, lowest
    for _ in range(ROUNDS):
        scale, offset = _fit(_codes(weights, scale, offset, 4), weights)
    return scale, offset


def _fit(codes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scale and offset of the line with the least squared error."""
    middle, mean = codes.mean(-1, keepdim=True), weights.mean(-1, keepdim=True)
    away = codes - middle
    spread = away.square().sum(-1, keepdim=True)
    scale = (away * weights).sum(-1, keepdim=True) / torch.where(spread == 0, 1, spread)
    return scale, mean - scale * middle
