"""The one form of all weight-only formats: unsigned codes, with a scale and an offset for each group of input columns.

    w[row, order[j]] = (scale[row, j // group] * codes[row, j] + offset[row, j // group]) * factor

    codes           [n, k] uint8, one a byte here; each device repacks them once into the layout its kernels like
    scale, offset   [n, k / group] float16
    factor          a power of two for the whole matrix: as small as scales and offsets in float16 allow, so that the
                    smallest of them keep as many bits as they can. Whatever some power of two makes exact, this one does.
    order           [k] int32 or None: which input column each column of codes belongs to (act-order), None as they stand

AWQ, GPTQ and GGUF differ only in the function that folds them into it (`fold_*.py`); `quantize.py` makes it out of floats.
A scale or offset that float16 cannot hold is rounded by at most 2^-11 of itself, a quarter of what bfloat16 does to a weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.quant.groups import GROUPS

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

    def _check(self, field: str, value: Tensor, dtype: torch.dtype, *shape: int) -> None:
        if value.dtype != dtype or value.shape != shape:
            raise LoadError(f"packed weight has {field} {value.dtype} {list(value.shape)}, expected {dtype} {list(shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def nbytes(self) -> int:
        """What a device holds of it: codes at their own width, without padding."""
        tables = (self.scale, self.offset, *([] if self.order is None else [self.order]))
        return self.codes.numel() * self.bits // 8 + sum(table.nbytes for table in tables)

    def dequantize(self) -> Tensor:
        """[n, k] float32, columns in their original order."""
        n, k = self.shape
        weights = self.codes.view(n, k // self.group, self.group) * self.scale.float().unsqueeze(-1)  # [n, groups, group]
        weights = weights.add_(self.offset.float().unsqueeze(-1)).mul_(self.factor).view(n, k)
        return weights if self.order is None else torch.empty_like(weights).index_copy_(1, self.order.long(), weights)

    def rows(self, index: slice | Tensor) -> "PackedWeight":
        """Some rows of it, in the order of `index`."""
        return replace(self, codes=self.codes[index], scale=self.scale[index], offset=self.offset[index])


def pack(name: str, bits: int, codes: Tensor, scale: Tensor, offset: Tensor, order: Tensor | None = None) -> PackedWeight:
    """Codes with scales and offsets in float32; `name` is the tensor's, for complaints."""
    group = codes.shape[1] // max(1, scale.shape[1])
    factor = fitting_factor(name, scale, offset)
    return PackedWeight(bits, group, codes, (scale / factor).half(), (offset / factor).half(), factor, order)


def fitting_factor(name: str, scale: Tensor, offset: Tensor) -> float:
    """The smallest power of two by which all can be divided into float16 (but no smaller than 2^-100, for float32's sake)."""
    most = [float(table.abs().max()) if table.numel() else 0.0 for table in (scale, offset)]
    if not all(math.isfinite(value) for value in most):
        raise LoadError(f"{name}: a scale or offset is not finite")
    digits, exponent = math.frexp(max(most))  # digits * 2^exponent, digits below 1
    return math.ldexp(1.0, max(exponent - (16 if digits <= LARGEST_HALF / 2**16 else 15), -100))


def mergeable(parts: Sequence[PackedWeight]) -> bool:
    """Whether their rows can stand in one matrix: columns of the same number and order (act-order may give each its own)."""
    first = parts[0]
    return all(part.shape[1] == first.shape[1] and _same_order(first.order, part.order) for part in parts)


def concatenate(parts: Sequence[PackedWeight]) -> PackedWeight:
    """The rows of all parts, which are mergeable, as one matrix: at the most bits and in the smallest group of any.

    Exact, but for scales and offsets 2^29 times smaller than the largest.
    """
    assert mergeable(parts)
    first = parts[0]
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    scale = torch.cat([_refine(part, part.scale, group) for part in parts])
    offset = torch.cat([_refine(part, part.offset, group) for part in parts])
    return pack("merged matrix", bits, torch.cat([part.codes for part in parts]), scale, offset, first.order)


def _refine(part: PackedWeight, table: Tensor, group: int) -> Tensor:
    """Scales or offsets of a part in float32, for each of the smaller groups."""
    return (table.float() * part.factor).repeat_interleave(part.group // group, dim=1)


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
