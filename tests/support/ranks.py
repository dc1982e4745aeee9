"""Ranks of tensor parallel as threads of one process, in lockstep: each waits for the others wherever they communicate."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from octavo.comm.comm import NullComm

Result = TypeVar("Result")
SECONDS = 60


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.given: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        found = [one for one in self.given if one is not None]
        self.barrier.wait()
        return found


class ThreadComm(NullComm):
    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self.meeting = rank, size, meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack([one.float() for one in self.meeting.exchange(self.rank, x)]).sum(0).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1)


def on_ranks(size: int, work: Callable[[ThreadComm], Result]) -> list[Result]:
    """What the work of each rank returns."""
    meeting = _Meeting(size)

    def guarded(rank: int) -> Result:
        try:
            return work(ThreadComm(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()  # so that nobody waits for this rank
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(guarded, range(size)))
