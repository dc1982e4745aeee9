"""Ranks that are processes of one host, which communicate through shared memory (`octavo/native/group.cpp`).

    fd = SharedMemoryComm.create(size)                           in the process that starts the ranks, which inherit the descriptor
    comm = SharedMemoryComm.join(fd, rank, size, seconds)        in each rank; the descriptor may be closed afterwards

The memory is unnamed, so it is freed with the last process that maps it, however that ends. A rank that waits longer than the limit
for another raises RankLost with its number, and so do all the others: the group cannot be used after that.
"""

import ctypes
import mmap
import os
import tempfile

import torch
from torch import Tensor

from octavo.errors import ConfigError, RankLost
from octavo.kernels.cpu.library import Group, NativeLibrary, find_library

SLOT_BYTES = 1 << 18  # 64 Ki floats: larger data is exchanged in parts, and these stay in a core's cache
SUMMED = (torch.float32, torch.bfloat16, torch.float16)


class SharedMemoryComm:
    def __init__(
        self, library: NativeLibrary, memory: mmap.mmap, rank: int, size: int, timeout_seconds: float, first: int = 0
    ) -> None:
        """`first`: the number of rank 0 in messages, if the ranks are part of a larger group."""
        self.rank = rank
        self.size = size
        self.seconds = timeout_seconds
        self._first = first
        self._call = library.call
        self._start = ctypes.c_char.from_buffer(memory)  # keeps the memory alive
        slot_bytes = (len(memory) - library.call.octavo_group_bytes(size, 0)) // (2 * size)
        start, limit = ctypes.addressof(self._start), round(timeout_seconds * 1000)
        self.group = Group(memory=start, slot_bytes=slot_bytes, rank=rank, size=size, timeout_ms=limit)

    @staticmethod
    def create(size: int, slot_bytes: int = SLOT_BYTES) -> int:
        """Returns the descriptor of memory for this many ranks. `slot_bytes`: a multiple of 64."""
        fd = _nameless()
        os.ftruncate(fd, _library().call.octavo_group_bytes(size, slot_bytes))
        return fd

    @staticmethod
    def join(fd: int, rank: int, size: int, timeout_seconds: float, first: int = 0) -> "SharedMemoryComm":
        return SharedMemoryComm(_library(), mmap.mmap(fd, os.fstat(fd).st_size), rank, size, timeout_seconds, first)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds in float32 and in rank order, and rounds once: every rank gets the same bits, in any order of arrival."""
        if x.dtype not in SUMMED:
            raise ValueError(f"ranks add floats of at most 32 bits, not {x.dtype}")
        total = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self.check(self._call.octavo_reduce(ctypes.byref(self.group), total.data_ptr(), total.numel()))
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._of_all(x).movedim(0, -2).flatten(-2)

    def wait_at_most(self, seconds: float) -> None:
        self.seconds, self.group.timeout_ms = seconds, round(seconds * 1000)

    def abort(self) -> None:
        """Tells the others that this rank failed, so that they stop waiting."""
        self._call.octavo_abort(ctypes.byref(self.group))

    def check(self, code: int) -> None:
        """Raises the error for the result code of a collective native call; 0 is success."""
        if code > 0:
            raise RankLost(f"rank {self._first + code - 1} did not answer for {self.seconds:g} s")
        if code < 0:
            raise RankLost(f"rank {self._first - code - 1} gave up, so rank {self._first + self.rank} cannot go on")

    def _of_all(self, x: Tensor) -> Tensor:
        """Returns x of every rank: [size, *x.shape]"""
        mine, everyone = x.contiguous(), x.new_empty(self.size, *x.shape)
        self.check(self._call.octavo_gather(ctypes.byref(self.group), mine.data_ptr(), everyone.data_ptr(), mine.nbytes))
        return everyone


def _nameless() -> int:
    """Returns the descriptor of a new unnamed file: in memory, if the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("octavo-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _library() -> NativeLibrary:
    library = find_library()
    if isinstance(library, str):
        raise ConfigError(f"ranks of one host communicate through the native library: {library}")
    return library
