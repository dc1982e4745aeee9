"""`MappedFile`: a large file whose bytes are used once, with little of it in memory at a time."""

import mmap
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

AHEAD = 64 * 2**20  # bytes that are read ahead
KEPT = 256 * 2**20  # bytes of recent tensors that are not released: parts of one matrix are used together
UNIT = mmap.PAGESIZE  # of memory: the granularity at which the kernel reads and drops


class MappedFile:
    """A file that is used once, approximately from its beginning to its end, with little of it in memory at a time.

    Data ahead is read from the disk while earlier data is used. Older ranges are released from memory; a view of them stays
    valid, since its bytes are read again on access.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private pages: nothing can be written back
        self._data = torch.frombuffer(self._map, dtype=torch.uint8)
        self._read_to = 0
        self._handed: deque[range] = deque()
        self._handed_bytes = 0

    def bytes(self, offset: int, size: int) -> Tensor:
        """Returns a view, which must not be modified."""
        self._read_ahead(offset, offset + size)
        self._give_back_others(range(offset, offset + size))
        return self._data[offset : offset + size]

    def _read_ahead(self, start: int, end: int) -> None:
        goes_on = start <= self._read_to <= end + AHEAD
        start = self._read_to if goes_on else start
        if end + AHEAD - start >= AHEAD // 2:
            self._advise(mmap.MADV_WILLNEED, start // UNIT * UNIT, end + AHEAD)
            self._read_to = end + AHEAD

    def _give_back_others(self, newest: range) -> None:
        self._handed.append(newest)
        self._handed_bytes += len(newest)
        while self._handed_bytes > KEPT and len(self._handed) > 1:
            oldest = self._handed.popleft()
            self._handed_bytes -= len(oldest)
            self._advise(mmap.MADV_DONTNEED, -(-oldest.start // UNIT) * UNIT, oldest.stop // UNIT * UNIT)

    def _advise(self, what: int, start: int, end: int) -> None:
        """`start`: a multiple of UNIT"""
        if start < min(end, len(self._map)):
            self._map.madvise(what, start, min(end, len(self._map)) - start)
