"""What AWQ and GPTQ checkpoints have in common: codes in 32-bit words, and tensors that belong to a module by their name.

    MODULE.qweight   codes          MODULE.scales   one for each group of input columns and output row
    MODULE.qzeros    zeros          w = scale * (code - zero)

The first code of a word is in its lowest bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.quant.packed import PackedWeight, pack

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Described(Protocol):
    """A tensor, or what a header says of one: sizes are checked before anything is read."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


Known = TypeVar("Known", bound=Described)


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes that the tensors of a module agree on."""

    n: int
    k: int
    group_size: int  # as published: columns that share a scale
    group: int  # of ours, of which those are made


@dataclass(frozen=True, slots=True, eq=False)
class ZeroPointWeight:
    """w[row, order[j]] = scale[row, j // group] * (codes[row, j] - zero[row, j // group])"""

    name: str  # of the module
    bits: int
    codes: Tensor  # [n, k] uint8
    scale: Tensor  # [n, k / group] float32
    zero: Tensor  # [n, k / group]
    order: Tensor | None = None  # [k] int32

    def fold(self) -> PackedWeight:
        return pack(f"{self.name}.scales", self.bits, self.codes, self.scale, -self.scale * self.zero, self.order)

    def dequantize(self) -> Tensor:
        """[n, k] float32, columns in their original order: exact, as codes less zeros have 9 bits and scales 11."""
        if not bool(self.scale.isfinite().all()):
            raise LoadError(f"{self.name}.scales: a scale is not finite")
        n, k = self.codes.shape
        groups = self.scale.shape[1]
        steps = self.codes.float().view(n, groups, k // groups).sub_(self.zero.unsqueeze(-1))
        weights = steps.mul_(self.scale.unsqueeze(-1)).view(n, k)
        return weights if self.order is None else torch.empty_like(weights).index_copy_(1, self.order.long(), weights)


def take(tensors: Mapping[str, Known], name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], why: str) -> Known:
    """The tensor `name`, checked; None in `shape` is any size but zero, `why` says where the expectation comes from."""
    tensor = tensors.get(name)
    if tensor is None:
        raise LoadError(f"{name} is missing")
    if tensor.dtype not in dtypes:
        raise LoadError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    sizes = list(tensor.shape)
    fits = len(shape) == len(sizes) and all(size == wanted if wanted is not None else size for size, wanted in zip(sizes, shape))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise LoadError(f"{name} is {sizes}, expected [{wanted}] ({why})")
    return tensor


def codes_of(words: Tensor, bits: int) -> Tensor:
    """int32 [..., words] to uint8 [..., words, codes in a word]."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # little-endian, as checkpoints are
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
