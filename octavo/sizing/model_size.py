"""The storage format of the matrices of a model, and the bytes of its weights, from its description: no tensor is created.

Each matrix is stored as floats or quantised:

    int8   8-bit weights in groups of 64      8.5 bits a weight; on a GPU groups of 128, 8.25
    int4   4-bit weights in groups of 32      5 bits a weight; on a GPU groups of 128, 4.25; the vocabulary, the most sensitive, in 8

Both fall back to smaller groups, and then to floats, if the columns are not a multiple of the group. Norms, biases, routers and an
untied embedding stay floats, and so do the matrices of heads around latents.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.models.description import EXPERT_STACKS, Matrix, ModelDescription
from octavo.policy.cache_spec import ITEM_BYTES

SCALE_AND_OFFSET = 4  # bytes for each group of quantised weights
DECIDING = ("router", "shared_gate", "delta_gates")  # small matrices that select experts, or scale what a layer remembers: they stay floats
_GROUPS = {8: (64, 32, 16), 4: (32, 16)}  # the first that fits
_GPU_GROUPS = (128, 64, 32, 16)  # a scale costs the GPU kernels more than those of the CPU


@dataclass(frozen=True, slots=True)
class Codes:
    """The format in which a quantised matrix is stored, in a file or in memory."""

    bits: int
    group: int
    order: str = ""  # identifies an order of columns; empty: the original order
    table: str = ""  # identifies a table of values of 4-bit weights; empty: the integers are the values
    fp8_span: int = 0  # for 8-bit floats: columns that share a scale, a whole row or a square block; 0: no scales, or integers


def requantised(matrix: Matrix, quantization: str, device: str) -> Codes | None:
    """Returns the format of a matrix when `quantization` is int8 or int4, or None if it stays floats. `device`: cpu or cuda"""
    if matrix.heads or matrix.name in DECIDING:
        return None
    bits = 8 if quantization == "int8" or matrix.vocabulary else 4
    groups = _GPU_GROUPS if device == "cuda" else _GROUPS[bits]
    return next((Codes(bits, group) for group in groups if matrix.columns % group == 0), None)


def fits_fp8(matrix: Matrix, span: int) -> bool:
    """Whether a GPU stores a matrix as 8-bit floats. Its kernels read one scale per row, or one per whole block of 128 x 128."""
    in_blocks = span > 0 and not any(size % span for size in (matrix.columns, *matrix.parts.values()))
    return matrix.name not in EXPERT_STACKS and (span == matrix.columns or in_blocks)


@dataclass(frozen=True, slots=True)
class Kept:
    """A matrix in the storage format of a program."""

    matrix: Matrix
    codes: Codes | None  # None: floats
    nbytes: int


def kept_matrices(
    model: ModelDescription, stored: Mapping[str, Codes | None], nbytes: Callable[[Matrix, Codes | None], int]
) -> list[Kept]:
    """Returns how each matrix is stored. `stored`: the storage format of each weight, by name; `nbytes`: of a matrix in the program"""
    found = []
    for matrix in model.matrices:
        codes = None if matrix.heads else _merged([stored.get(part) for part in matrix.parts])
        found.append(Kept(matrix, codes, nbytes(matrix, codes)))
    return found


def _merged(parts: list[Codes | None]) -> Codes | None:
    """Returns the format of a matrix of several parts: the largest number of bits and the smallest group of any.

    It is None, for floats, if a part is stored as floats or has another column order. If tables differ, weights have 8 bits.
    """
    codes = [part for part in parts if part is not None]
    if len(codes) < len(parts) or len({part.order for part in codes}) > 1:
        return None
    table = codes[0].table if len({part.table for part in codes}) == 1 else None
    bits = max(part.bits for part in codes) if table is not None else 8
    span = codes[0].fp8_span if len({part.fp8_span for part in codes}) == 1 else 0
    return Codes(bits, min(part.group for part in codes), codes[0].order, table or "", span)


def weight_bytes(model: ModelDescription, dtype: str) -> int:
    """Returns the bytes of all weights as torch stores them."""
    return model.num_parameters * ITEM_BYTES[dtype] + model.wide_numbers * (ITEM_BYTES["float32"] - ITEM_BYTES[dtype])


def largest_matrix(model: ModelDescription) -> int:
    """Returns how many numbers the largest matrix of a file has."""
    return max(rows * one.columns for one in model.matrices for rows in one.parts.values())
