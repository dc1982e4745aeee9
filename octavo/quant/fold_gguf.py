"""GGUF's quantised kinds in the packed form.

    exact (scales below 512)  Q4_0 Q4_1 -> 4 bits    Q5_0 Q5_1 Q8_0 -> 8 bits           groups of 32
    scales to 11 bits         Q2_K Q3_K -> 4 bits    Q6_K -> 8 bits                     groups of 16
                              Q4_K      -> 4 bits    Q5_K -> 8 bits                     groups of 32

A scale of a K kind is a float16 times an integer of up to 7 bits; in float16 it is off by at most 2^-11 of itself. Where codes
are counted from a middle (Q3_K, Q6_K), so is each weight; in the others it is off by at most 2^-11 of |scale * code| + |offset|.
"""

from torch import Tensor

from octavo.errors import LoadError
from octavo.kernels.reference.dequant import QUANTISED, take_apart
from octavo.quant.packed import PackedWeight, pack

_FOUR_BITS = ("Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K")


def fold_gguf(raw: Tensor, kind: str, shape: tuple[int, ...], name: str) -> PackedWeight:
    """The matrix of `shape` whose bytes are `raw` (uint8, contiguous), a tensor called `name` of a GGUF file."""
    _check(raw, kind, shape, name)
    codes, middle, scale, offset = take_apart(raw, kind)
    if offset is None:
        offset = scale * -middle  # by a power of two: rounds as the scale does
    n = shape[0]
    return pack(name, 4 if kind in _FOUR_BITS else 8, codes.view(shape), scale.view(n, -1), offset.view(n, -1))


def _check(raw: Tensor, kind: str, shape: tuple[int, ...], name: str) -> None:
    if kind not in QUANTISED:
        raise LoadError(f"{name}: {kind} has no packed form; supported: {', '.join(QUANTISED)}")
    group, group_bytes = 256 if kind.endswith("_K") else 32, QUANTISED[kind][0]
    if len(shape) != 2 or shape[1] % group or raw.numel() * group != shape[0] * shape[1] * group_bytes:
        raise LoadError(f"{name}: {raw.numel()} bytes of {kind} are no matrix {list(shape)}, with {group_bytes} bytes for {group} columns")
