"""Memory for packed weights in huge pages: a step reads all of it, and takes about 4 % longer with 4 kB pages."""

import mmap
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
LINE = 64  # bytes of a cache line, and of a register: no load should cross a boundary
_HUGE = 2 << 20
_CHUNK = 256 << 20  # arrays share a mapping, so that few pages are half empty; untouched pages use no memory
LEAST = 4 << 10  # smaller arrays are allocated alone, so that memory checkers can detect reads beyond their end


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
