"""The groups of decode context parallel, as processes: neighbouring ranks, which meet in a memory of their own.

    decode_context_parallel_size 2     ranks  0 1  |  2 3      a memory for each pair, beside the one of all ranks

A group of one rank needs none. Ranks wait less long for their own group than for all: who misses a rank there is the first to say so.
"""

import os

from octavo.layers.comm import Comm, NullComm
from octavo.layers.shared_comm import SharedMemoryComm

PATIENCE = 0.8  # of the time that ranks wait for all others


class ContextGroups:
    """All groups, as the process sees them that starts the ranks. It is rank 0, and so the first of the first group."""

    def __init__(self, ranks: int, size: int, timeout_seconds: float) -> None:
        self._size = size
        self._memories = [SharedMemoryComm.create(size) for _ in range(ranks // size)] if size > 1 else []
        firsts = [(memory, group * size) for group, memory in enumerate(self._memories)]
        self._comms = [SharedMemoryComm.join(memory, 0, size, timeout_seconds, first) for memory, first in firsts]

    @property
    def comm(self) -> Comm:
        """Of rank 0."""
        return self._comms[0] if self._comms else NullComm()

    def memory(self, rank: int) -> int | None:
        """Returns the descriptor of the memory that a rank joins its group in."""
        return self._memories[rank // self._size] if self._memories else None

    def wait_at_most(self, seconds: float) -> None:
        for comm in self._comms:
            comm.wait_at_most(PATIENCE * seconds)

    def abort(self) -> None:
        """Nobody waits any longer for others, in any group."""
        for comm in self._comms:
            comm.abort()

    def close(self) -> None:
        for memory in self._memories:
            os.close(memory)


def join_context(memory: int | None, rank: int, size: int, timeout_seconds: float) -> Comm:
    """Returns a rank's way to the others of its group. `rank`: among all ranks"""
    if memory is None:
        return NullComm()
    return SharedMemoryComm.join(memory, rank % size, size, timeout_seconds, rank // size * size)
