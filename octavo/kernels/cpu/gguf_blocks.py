"""Converts blocks of GGUF files to codes with the native library, on all its threads: several times faster than torch, with equal bits.

Rare kinds are left to torch (`kernels/reference/dequant.py`), and so are all kinds if there is no library.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.cpu.library import NativeLibrary, address, find_library


class BlockKind(NamedTuple):
    place: int  # in BLOCK_KINDS of `native/packing.cpp`
    num_bytes: int  # of a block
    num_codes: int
    group: int  # codes that share a scale and an offset
    bits: int


BLOCK_KINDS = {
    "Q4_0": BlockKind(0, 18, 32, 32, 4),
    "Q4_1": BlockKind(1, 20, 32, 32, 4),
    "Q8_0": BlockKind(2, 34, 32, 32, 8),
    "Q4_K": BlockKind(3, 144, 256, 32, 4),
    "Q5_K": BlockKind(4, 176, 256, 32, 8),
    "Q6_K": BlockKind(5, 210, 256, 16, 8),
}

Floats = NDArray[np.float32]


def unpack_blocks(raw: NDArray[np.uint8], kind: str) -> tuple[NDArray[np.uint8], Floats, Floats] | None:
    """Returns codes, and the scale and offset of each run, or None if this kind is not supported here."""
    library = find_library()
    if kind not in BLOCK_KINDS or not isinstance(library, NativeLibrary):
        return None
    form = BLOCK_KINDS[kind]
    count = raw.size // form.num_bytes
    codes = np.empty(count * form.num_codes, np.uint8)
    scale, offset = (np.empty(codes.size // form.group, np.float32) for _ in range(2))
    library.call.octavo_unpack_blocks(form.place, address(raw), count, address(codes), address(scale), address(offset))
    return codes, scale, offset


def write_floats(raw: NDArray[np.uint8], kind: str, library: NativeLibrary, to: int, floats: int) -> None:
    """Writes the dequantised numbers of blocks to the address `floats`, in the format `to`: F32, BF16 or F16."""
    form = BLOCK_KINDS[kind]
    library.call.octavo_block_floats(form.place, address(raw), raw.size // form.num_bytes, to, floats)


def largest_of_blocks(raw: NDArray[np.uint8], kind: str, library: NativeLibrary) -> float:
    """Returns the largest |scale| or |offset| of some blocks; infinity if one is NaN."""
    form = BLOCK_KINDS[kind]
    return float(library.call.octavo_block_range(form.place, address(raw), raw.size // form.num_bytes))


def halves(numbers: Floats, factor: float) -> NDArray[np.float16] | None:
    """Returns the numbers divided by a power of two, in float16, in which they must fit, or None if there is no library."""
    library = find_library()
    if not isinstance(library, NativeLibrary):
        return None
    found = np.empty(numbers.shape, np.float16)
    library.call.octavo_halves(address(numbers), numbers.size, factor, address(found))
    return found
