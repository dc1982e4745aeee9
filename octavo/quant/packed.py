"""The common form of all weight-only formats: unsigned codes, with a scale and an offset for each group of input columns.

    w[row, order[j]] = (scale[row, j // group] * codes[row, j] + offset[row, j // group]) * factor

    codes           [n, k] uint8, one per byte here; each device repacks them once into the layout of its kernels
    scale, offset   [n, k / group] float16
    factor          a power of two for the whole matrix: the smallest with which scales and offsets fit into float16, so that the
                    smallest of them keep as many bits as possible. If any power of two makes the conversion exact, this one does.
    order           [k] int32 or None: the input column of each column of codes (act-order), None for the original order
    table           [16] uint8 or None: the value of each 4-bit code in the formula, for formats with uneven steps
                    (MXFP4, IQ4_NL). None: the code itself

`fold_gguf` and `zero_point.py` convert published formats to this form; `quantize` and `fp8.py` convert floats.
A scale or offset that float16 cannot represent is rounded by a relative error of at most 2^-11, a quarter of that of bfloat16 weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.kernels.cpu.gguf_blocks import halves, unpack_blocks
from octavo.kernels.reference.dequant import QUANTISED, group_size, take_apart
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
        """The bytes on a device: codes with their own number of bits, without padding."""
        beside = (self.scale, self.offset, *(part for part in (self.order, self.table) if part is not None))
        return self.codes.numel() * self.bits // 8 + sum(part.nbytes for part in beside)

    def dequantize(self) -> Tensor:
        """Returns the weights [n, k] in float32, with columns in their original order."""
        n, k = self.shape
        weights = self._values().view(n, k // self.group, self.group) * self.scale.float().unsqueeze(-1)  # [n, groups, group]
        weights = weights.add_(self.offset.float().unsqueeze(-1)).mul_(self.factor).view(n, k)
        return weights if self.order is None else torch.empty_like(weights).index_copy_(1, self.order.long(), weights)

    def rows(self, index: slice | Tensor) -> "PackedWeight":
        """Returns the rows that `index` selects, in its order."""
        return replace(self, codes=self.codes[index], scale=self.scale[index], offset=self.offset[index])

    def columns(self, index: Tensor) -> "PackedWeight | None":
        """Returns the weights with the column `index[j]` as column j. Columns that leave their groups are computed in the old order.

        Some of the columns are returned only in whole groups, otherwise None.
        """
        assert self.order is None, "columns are reordered once"
        first = index[:: self.group]
        if torch.equal(index, (first[:, None] + torch.arange(self.group)).view(-1)) and not bool((first % self.group).any()):
            groups = first // self.group
            return replace(self, codes=self.codes[:, index], scale=self.scale[:, groups], offset=self.offset[:, groups])
        return replace(self, order=torch.argsort(index).int()) if len(index) == self.shape[1] else None

    def without_table(self) -> "PackedWeight":
        """Returns the same weights with codes as values: with 8 bits, if there was a table."""
        return self if self.table is None else replace(self, bits=8, codes=self._values(), table=None)

    def _values(self) -> Tensor:
        """Returns the values of the codes, uint8 [n, k]."""
        return self.codes if self.table is None else self.table[self.codes.long()]


def pack(
    name: str, bits: int, codes: Tensor, scale: Tensor, offset: Tensor, order: Tensor | None = None, table: Tensor | None = None
) -> PackedWeight:
    """Returns the packed form of codes with scales and offsets in float32. `name`: of the tensor, for messages."""
    group = codes.shape[1] // max(1, scale.shape[1])
    factor = fitting_factor(name, scale, offset)
    return PackedWeight(bits, group, codes, _halved(scale, factor), _halved(offset, factor), factor, order, table)


def _halved(numbers: Tensor, factor: float) -> Tensor:
    """Returns the numbers divided by the factor, in float16."""
    found = halves(numbers.float().contiguous().numpy(), factor) if numbers.device.type == "cpu" else None
    return (numbers / factor).half() if found is None else torch.from_numpy(found)


def fitting_factor(name: str, scale: Tensor, offset: Tensor) -> float:
    """Returns the smallest power of two by which all of them can be divided to fit into the range of float16.

    It is at least 2^-100, so that products fit into float32.
    """
    most = [float(table.abs().max()) if table.numel() else 0.0 for table in (scale, offset)]
    return factor_for(name, math.nan if any(map(math.isnan, most)) else max(most))


def factor_for(name: str, largest: float) -> float:
    """Like `fitting_factor`, for the largest of all scales and offsets."""
    if not math.isfinite(largest):
        raise LoadError(f"{name}: a scale or offset is not finite")
    digits, exponent = math.frexp(largest)  # digits * 2^exponent, digits below 1
    return math.ldexp(1.0, max(exponent - (16 if digits <= LARGEST_HALF / 2**16 else 15), -100))


def mergeable(parts: Sequence[PackedWeight]) -> bool:
    """Whether the rows of all parts fit into one matrix: they need the same columns, in the same order (act-order may differ)."""
    first = parts[0]
    return all(part.shape[1] == first.shape[1] and _same(first.order, part.order) for part in parts)


def concatenate(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Returns one matrix with the rows of all parts, which must be mergeable. It has the most bits and the smallest group of any.

    Parts whose tables differ, or of which only some have one, lose them, and have 8 bits. This is exact, except for scales and offsets that
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
#     exact (scales below 512)  Q4_0 Q4_1 IQ4_NL -> 4 bits    Q5_0 Q5_1 Q8_0 -> 8 bits               groups of 32
#                               TQ1_0 TQ2_0 -> 4 bits                                                groups of 128
#     exact (powers of two)     MXFP4 -> 4 bits                                                      groups of 32
#     scales to 11 bits         Q2_K Q3_K -> 4 bits           Q6_K IQ1_M IQ2_XS IQ2_S -> 8 bits      groups of 16
#                               Q4_K IQ4_XS -> 4 bits         Q5_K IQ1_S IQ2_XXS IQ3_XXS IQ3_S -> 8 bits   groups of 32
#
# A scale of a K or IQ kind is a float16 times an integer of up to 7 bits; in float16 its relative error is at most 2^-11. If codes
# are relative to a middle (all but Q2_K, Q4_K, Q5_K), the same holds for weights; otherwise their error is at most 2^-11 of
# |scale * code| + |offset|. Scales of MXFP4 are powers of two. One that is 2^39 times smaller than the matrix's largest becomes zero.

_FOUR_BITS = ("Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0")


def fold_gguf(raw: Tensor, kind: str, shape: tuple[int, ...], name: str) -> PackedWeight:
    """Returns the matrix of `shape` whose bytes are `raw` (uint8, contiguous). `name`: of the tensor in the file, for messages."""
    _check_gguf(raw, kind, shape, name)
    bits, n = 4 if kind in _FOUR_BITS else 8, shape[0]
    if (found := unpack_blocks(raw.numpy(), kind)) is not None:
        codes, scale, offset = (torch.from_numpy(part) for part in found)
        return pack(name, bits, codes.view(shape), scale.view(n, -1), offset.view(n, -1))
    parts = take_apart(raw, kind)
    runs = -(-group_size(kind) // parts.scale.shape[1] // GROUPS[0])  # of the longest supported groups, in one group of the file
    scale = parts.scale.repeat_interleave(runs, dim=1) if runs > 1 else parts.scale
    offset = scale * -parts.middle if parts.offset is None else parts.offset  # by a power of two: rounds as the scale does
    return pack(name, bits, parts.codes.view(shape), scale.view(n, -1), offset.view(n, -1), table=parts.table)


def _check_gguf(raw: Tensor, kind: str, shape: tuple[int, ...], name: str) -> None:
    if kind not in QUANTISED:
        raise LoadError(f"{name}: {kind} has no packed form; supported: {', '.join(QUANTISED)}")
    group, group_bytes = group_size(kind), QUANTISED[kind][0]
    if len(shape) != 2 or shape[1] % group or raw.numel() * group != shape[0] * shape[1] * group_bytes:
        raise LoadError(f"{name}: {raw.numel()} bytes of {kind} do not fit {list(shape)}, with {group_bytes} bytes for {group} columns")


# -- converts floats to the packed form, for models without quantised weights
#
#     8 bits   codes are relative to the middle. The largest weight of a group is 127 steps away from it; zero stays zero.
#     4 bits   there are 15 steps from the lowest to the highest weight of a group. Then, twice: the line through (code, weight) with
#              the least squared error gives a better scale and offset, and those give better codes.
#
# Neither half of such a round can increase the error. Two rounds reduce it by 8 to 12 %. That is more than a search over ranges
# that exclude the outermost weights gains, and it costs less.

ROUNDS = 2
CHUNK = 1 << 18  # weights at a time: fits into a core's cache
GPU_CHUNKS = 16  # this many at once keep a GPU busy


def quantize(weight: Tensor, bits: int, group: int = 32, name: str = "weight") -> PackedWeight:
    """Quantises a matrix [n, k] of any float dtype. `name`: of the tensor, for messages."""
    if bits not in BITS or group not in GROUPS:
        raise LoadError(f"{name}: {bits} bits in groups of {group} are not supported, only bits {BITS} and groups {GROUPS}")
    if weight.dim() != 2 or weight.shape[1] % group or not weight.numel():
        raise LoadError(f"{name} is {list(weight.shape)}, expected a matrix with rows of whole groups of {group}")
    n, k = weight.shape
    rows = max(1, CHUNK * (GPU_CHUNKS if weight.is_cuda else 1) // k)
    chunks = weight.reshape(n, k // group, group).split(rows)
    lines = [fitted_line(chunk.float()) if bits == 4 else even_line(chunk.float()) for chunk in chunks]
    scale = torch.cat([scale for scale, _ in lines])  # [n, groups, 1]
    offset = torch.cat([offset for _, offset in lines])
    factor = fitting_factor(name, scale, offset)
    scale, offset = (scale / factor).half(), (offset / factor).half()
    codes = torch.empty(n, k // group, group, dtype=torch.uint8, device=weight.device)
    kept = (scale.float() * factor, offset.float() * factor)  # codes must match the float16 values
    for chunk, scales, offsets, out in zip(chunks, *(table.split(rows) for table in kept), codes.split(rows)):
        out.copy_(nearest_codes(chunk.float(), scales, offsets, bits))
    return PackedWeight(bits, group, codes.view(n, k), scale.squeeze(-1), offset.squeeze(-1), factor)


def nearest_codes(weights: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor:
    """Returns the nearest codes, as floats. A group with scale zero contains only one number, its offset."""
    steps = (weights - offset).div_(torch.where(scale == 0, 1, scale))
    return steps.round_().clamp_(0, 2**bits - 1)


def even_line(weights: Tensor) -> tuple[Tensor, Tensor]:
    scale = weights.abs().amax(-1, keepdim=True) / 127
    return scale, scale * -128


def fitted_line(weights: Tensor) -> tuple[Tensor, Tensor]:
    lowest = weights.amin(-1, keepdim=True)
    scale, offset = (weights.amax(-1, keepdim=True) - lowest) / 15, lowest
    for _ in range(ROUNDS):
        scale, offset = _fit(nearest_codes(weights, scale, offset, 4), weights)
    return scale, offset


def _fit(codes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scale and offset of the line with the least squared error."""
    middle, mean = codes.mean(-1, keepdim=True), weights.mean(-1, keepdim=True)
    away = codes - middle
    spread = away.square().sum(-1, keepdim=True)
    scale = (away * weights).sum(-1, keepdim=True) / torch.where(spread == 0, 1, spread)
    return scale, mean - scale * middle
