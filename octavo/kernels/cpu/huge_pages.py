"""Memory for packed weights in huge pages: a step reads all of it, and with pages of 4 kB it takes about 4 % longer."""

import mmap
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
LINE = 64  # bytes of a cache line, and of a register: no load should touch two
_HUGE = 2 << 20
_CHUNK = 256 << 20  # arrays share a mapping, so that few of its pages are half empty; pages that nobody has touched take no memory
LEAST = 4 << 10  # smaller arrays lie alone, as do all where a checker of memory is to see what reads past their end


class _Chunk:
    """The mapping that arrays are cut from. It lives as long as one of them does."""

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
    """Returns memory from the beginning of a cache line on."""
    return _chunk.cut(size) if size >= LEAST else _alone(size)


def _alone(size: int) -> Bytes:
    """What is cut off to reach a line's beginning lies before the array, never behind it."""
    raw = np.empty(size + LINE, np.uint8)
    start = LINE - raw.ctypes.data % LINE
    return raw[start : start + size]


def _mapping(size: int) -> Bytes:
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)
