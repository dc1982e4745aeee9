"""Ranks that have a GPU each: they meet through NCCL, whose calls CUDA graphs capture as they capture kernels.

    comm = NcclComm.join(path, rank, size)    in each rank, after its GPU was chosen; `path`: a file that all of them can write

Ranks connect when they meet for the first time. The host waits for nobody: a call is put behind the kernels before it. NCCL listens at
a port of this host while ranks connect.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, FileStore, PrefixStore, Store


class NcclComm:
    def __init__(self, store: Store, rank: int, size: int) -> None:
        nccl: Any = torch._C._distributed_c10d.ProcessGroupNCCL  # builds of torch without CUDA have none
        self.rank = rank
        self.size = size
        self._store = store
        self._group: Any = nccl(store, rank, size, nccl.Options())
        self._parts: list[NcclComm] = []

    @staticmethod
    def join(path: str, rank: int, size: int) -> "NcclComm":
        return NcclComm(FileStore(path, size), rank, size)

    def part(self, name: str, ranks: Sequence[int]) -> "NcclComm":
        """Returns a group of some of these ranks, in this order. All of them call it with the same name."""
        part = NcclComm(PrefixStore(name, self._store), list(ranks).index(self.rank), len(ranks))
        self._parts.append(part)
        return part

    def all_reduce(self, x: Tensor) -> Tensor:
        """Every rank gets the same bits. x may be changed."""
        total = x.contiguous()
        self._done(self._group.allreduce([total], _in_order(AllreduceOptions())))
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        everyone = x.new_empty(self.size, *x.shape)
        self._done(self._group._allgather_base(everyone, x.contiguous(), _in_order(AllgatherOptions())))
        return everyone.movedim(0, -2).flatten(-2)

    @staticmethod
    def _done(work: Any) -> None:
        """Puts what follows behind the call. The host does not wait."""
        if work is not None:
            work.wait()

    def wait_at_most(self, seconds: float) -> None:
        """Kernels of a GPU have no time limit: who started the ranks notices one that is gone."""

    def abort(self) -> None:
        """This rank waits no longer, in any group."""
        for comm in (self, *self._parts):
            with suppress(Exception):  # what is gone cannot be left
                comm._group.abort()


def _in_order(options: Any) -> Any:
    """Returns options of a call that runs in the stream of the caller."""
    with suppress(AttributeError):  # a version of torch before there was a choice
        options.asyncOp = False
    return options
