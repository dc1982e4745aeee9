"""Packs weights for the native products, once, into panels of 16 rows. `octavo/native/octavo.h` draws the layout.

    w [n, k] float             pack_float    F32, or rounded to BF16 or F16
    codes [n, k] and, for each group of k,   Q8 (a byte per code) or Q4 (half a byte);
    scale and offset [n, groups] float16     pack_codes    w = (scale * code + offset) * factor; a table may define the value of a code
    blocks of a GGUF file                    pack_blocks   the same, without an intermediate copy
"""

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.cpu.gguf_blocks import BLOCK_KINDS
from octavo.kernels.cpu.library import BF16, F16, F32, K_PAD, PANEL, Q4, Q8, Matrix, NativeLibrary, address

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
MOST_HALF = 1024  # the largest weight of kind F16, before the factor of its matrix
LINE = 64  # bytes of a cache line, and of a register: no load should cross a boundary
_HUGE = 2 << 20
_CHUNK = 256 << 20  # arrays share a mapping, so that few pages are half empty; untouched pages use no memory
LEAST = 4 << 10  # smaller arrays are allocated alone, so that memory checkers can detect reads beyond their end

# -- memory in huge pages: a step reads all of it, and takes about 4 % longer with 4 kB pages


class _Chunk:
    """The mapping that arrays are cut from. It lives as long as any of them."""

    def __init__(self) -> None:
        self._memory: weakref.ref[Bytes] | None = None
        self._used = 0
        self._lock = threading.Lock()

    def cut(self, size: int) -> Bytes:
        with self._lock:
            memory = self._memory() if self._memory else None
            if memory is None or self._used + size > memory.size:
                memory = _mapping(max(size, _CHUNK) + _HUGE)
                self._memory, self._used = weakref.ref(memory), -memory.ctypes.data % _HUGE
            start = self._used
            self._used += -(-size // LINE) * LINE
            return memory[start : start + size]


_chunk = _Chunk()


def lines(size: int) -> Bytes:
    """Returns memory that starts at a cache line boundary."""
    return _chunk.cut(size) if size >= LEAST else _alone(size)


def _alone(size: int) -> Bytes:
    """The padding for alignment is before the array, never after it."""
    raw = np.empty(size + LINE, np.uint8)
    start = LINE - raw.ctypes.data % LINE
    return raw[start : start + size]


def _mapping(size: int) -> Bytes:
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)


# -- panels


@dataclass(frozen=True)
class PackedMatrix:
    struct: Matrix
    arrays: tuple[NDArray[Any], ...]  # arrays that the struct points to


def pack_float(
    library: NativeLibrary,
    weights: Floats,
    kind: int = F32,
    bias: Floats | None = None,
    order: NDArray[np.int32] | None = None,
    rows: NDArray[np.int64] | None = None,
) -> PackedMatrix:
    """`rows`: the row of the weights for each row of the matrix, -1 for zeros"""
    n, k = weights.shape if rows is None else (len(rows), weights.shape[1])
    data = lines(_up(n, PANEL) * _up(k, K_PAD) * (4 if kind == F32 else 2))
    factor = _half_factor(weights) if kind == F16 else 1.0
    matrix = Matrix(kind=kind, n=n, k=k, data=address(data), factor=factor, bias=address(bias), order=address(order))
    library.call.octavo_pack_float(ctypes.byref(matrix), address(weights), address(rows))
    return PackedMatrix(matrix, (data, *(array for array in (bias, order) if array is not None)))


def pack_codes(
    library: NativeLibrary,
    codes: NDArray[np.uint8],
    scale: NDArray[np.float16],
    offset: NDArray[np.float16],
    group: int,
    kind: int = Q8,
    factor: float = 1.0,
    bias: Floats | None = None,
    order: NDArray[np.int32] | None = None,
    rows: NDArray[np.int64] | None = None,
    table: NDArray[np.uint8] | None = None,
) -> PackedMatrix:
    """`rows`: as in `pack_float`. `table`: the value of each 4-bit code"""
    n, k = codes.shape if rows is None else (len(rows), codes.shape[1])
    matrix, arrays = _empty_codes(n, k, group, kind, factor)
    matrix.bias, matrix.order, matrix.table = address(bias), address(order), address(table)
    library.call.octavo_pack_codes(ctypes.byref(matrix), address(codes), address(scale), address(offset), address(rows))
    return PackedMatrix(matrix, (*arrays, *(array for array in (bias, table, order) if array is not None)))


def _empty_codes(n: int, k: int, group: int, kind: int, factor: float) -> tuple[Matrix, tuple[NDArray[np.uint8], ...]]:
    """Returns a matrix of codes that is not filled yet, with the memory of its codes, scales and offsets."""
    lanes, columns = _up(n, PANEL), _up(k, max(group, K_PAD))
    data = lines(lanes * columns // (2 if kind == Q4 else 1))
    scales, offsets = lines(lanes * columns // group * 2), lines(lanes * columns // group * 2)
    matrix = Matrix(kind=kind, group=group, n=n, k=k, data=address(data), scale=address(scales), offset=address(offsets), factor=factor)
    return matrix, (data, scales, offsets)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix as stored in a GGUF file."""

    name: str  # of the tensor, for messages
    raw: NDArray[np.uint8]
    kind: str  # one of BLOCK_KINDS
    shape: tuple[int, int]
    rows: NDArray[np.int64] | None = None  # the rows to pack, if they are not all of them in the file's order


def pack_blocks(
    library: NativeLibrary, parts: Sequence[Blocks], factor: float, bias: Floats | None = None, rows: NDArray[np.int64] | None = None
) -> PackedMatrix:
    """Packs the rows of all parts directly from the file: codes have the most bits and the smallest group of any part.

    `factor`: as for codes, `rows`: as in `pack_float`
    """
    bits, group = max(BLOCK_KINDS[part.kind].bits for part in parts), min(BLOCK_KINDS[part.kind].group for part in parts)
    order = _stored_rows(parts, rows)
    n, k = sum(part.shape[0] for part in parts) if order is None else len(order), parts[0].shape[1]
    kind = Q4 if bits == 4 else Q8
    matrix, arrays = _empty_codes(n, k, group, kind, factor)
    matrix.bias = address(bias)
    tensors = np.array([address(part.raw) for part in parts], np.uint64)
    sizes, kinds = np.array([part.shape[0] for part in parts]), np.array([BLOCK_KINDS[part.kind].place for part in parts], np.int32)
    library.call.octavo_pack_blocks(ctypes.byref(matrix), address(tensors), address(sizes), address(kinds), address(order))
    return PackedMatrix(matrix, (*arrays, *([] if bias is None else [bias])))


def _stored_rows(parts: Sequence[Blocks], rows: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Returns the row of the file for each row of the matrix, -1 for zeros; None: the same order."""
    if all(part.rows is None for part in parts):
        return rows
    starts = np.cumsum([0, *(part.shape[0] for part in parts)])
    inner = np.concatenate([start + (np.arange(part.shape[0]) if part.rows is None else part.rows) for start, part in zip(starts, parts)])
    return inner if rows is None else np.where(rows < 0, -1, inner[rows])


def unpack_rows(packed: PackedMatrix, rows: NDArray[np.int64]) -> Floats:
    """Unpacks rows to floats, with the same bits as in the native step for an embedding that is tied to the head."""
    matrix, (data, *rest) = packed.struct, packed.arrays

    def picked(array: NDArray[Any], dtype: Any, side: int) -> NDArray[Any]:
        """[rows, along k, side]; `side`: how many numbers of a row are contiguous"""
        panels: NDArray[Any] = array.view(dtype).reshape(-(-matrix.n // PANEL), -1, PANEL, side)
        return panels[rows // PANEL, :, rows % PANEL]

    if matrix.kind == F32:
        values = picked(data, np.float32, 1)
    elif matrix.kind == F16:
        values = picked(data, np.float16, 1).astype(np.float32) * np.float32(matrix.factor)
    elif matrix.kind == BF16:
        values = (picked(data, np.uint16, 2).astype(np.uint32) << 16).view(np.float32)
    else:
        codes = picked(data, np.uint8, 4)
        if matrix.kind == Q4:
            codes = np.stack((codes & 15, codes >> 4), axis=2)
        if matrix.table:
            codes = _table_of(packed)[codes]
        scale, offset = (picked(part, np.float16, 1).astype(np.float32) for part in rest[:2])  # [rows, groups, 1]
        values = (scale * codes.reshape(len(rows), scale.shape[1], -1) + offset) * np.float32(matrix.factor)
    values = values.reshape(len(rows), -1)[:, : matrix.k]
    return values[:, np.argsort(rest[-1])] if matrix.order else values


def _half_factor(weights: Floats) -> float:
    """Returns the power of two that scales the largest weight to about 1,024: a sum of 32 products with numbers up to 1 must not overflow
    float16, and small weights should keep their precision."""
    largest = float(max(weights.max(initial=0), -weights.min(initial=0)))
    return float(2.0 ** math.ceil(math.log2(largest / MOST_HALF))) if largest > 0 else 1.0


def _table_of(packed: PackedMatrix) -> NDArray[np.uint8]:
    return next(array for array in packed.arrays if array.ctypes.data == packed.struct.table)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
