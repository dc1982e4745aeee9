"""Blocks of GGUF files into codes by the native library, on all its threads: several times faster than torch, bit for bit the same.

Kinds that few files have are left to torch (`kernels/reference/dequant.py`), and so is everything where there is no library.
"""

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.cpu.library import NativeLibrary, address, find_library

# By kind, in the order of BLOCK_KINDS (`native/packing.cpp`): bytes, codes and runs of a block
BLOCK_KINDS = {
    "Q4_0": (18, 32, 1), "Q4_1": (20, 32, 1), "Q8_0": (34, 32, 1),
    "Q4_K": (144, 256, 8), "Q5_K": (176, 256, 8), "Q6_K": (210, 256, 16),
}  # fmt: skip

Floats = NDArray[np.float32]


def unpack_blocks(raw: NDArray[np.uint8], kind: str) -> tuple[NDArray[np.uint8], Floats, Floats] | None:
    """Returns codes, and the scale and offset of each run; None: somebody else has to."""
    library = find_library()
    if kind not in BLOCK_KINDS or not isinstance(library, NativeLibrary):
        return None
    num_bytes, num_codes, runs = BLOCK_KINDS[kind]
    count = raw.size // num_bytes
    codes, scale, offset = np.empty(count * num_codes, np.uint8), np.empty(count * runs, np.float32), np.empty(count * runs, np.float32)
    place = list(BLOCK_KINDS).index(kind)
    library.call.octavo_unpack_blocks(place, address(raw), count, address(codes), address(scale), address(offset))
    return codes, scale, offset


def halves(numbers: Floats, factor: float) -> NDArray[np.float16] | None:
    """Returns the numbers divided by a power of two, in float16, which must be able to hold them; None: somebody else has to."""
    library = find_library()
    if not isinstance(library, NativeLibrary):
        return None
    found = np.empty(numbers.shape, np.float16)
    library.call.octavo_halves(address(numbers), numbers.size, factor, address(found))
    return found
