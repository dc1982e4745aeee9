"""Ranks with one GPU each, which communicate through NCCL. CUDA graphs capture its calls like kernels.

    comm = NcclComm.join(path, rank, size)    in each rank, after its GPU was selected; `path`: a file that all of them can write

Ranks connect at their first collective operation. The host never waits: a call is queued after the kernels before it. NCCL listens at
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
        nccl: Any = torch._C._distributed_c10d.ProcessGroupNCCL  # absent in builds of torch without CUDA
        self.rank = rank
        self.size = size
        self._store = store
        self._group: Any = nccl(store, rank, size, nccl.Options())
        self._parts: list[NcclComm] = []

    @staticmethod
    def join(path: str, rank: int, size: int) -> "NcclComm":
        return NcclComm(FileStore(path, size), rank, size)

    def part(self, name: str, ranks: Sequence[int]) -> "NcclComm":
        """Returns a group of some of these ranks, in this order. All of them must call it with the same name."""
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
        """Orders later kernels after the call. The host does not wait."""
        if work is not None:
            work.wait()

    def wait_at_most(self, seconds: float) -> None:
        """Does nothing: GPU kernels have no time limit. The parent notices a rank that is gone."""

    def abort(self) -> None:
        """Ends the waiting of this rank, in all groups."""
        for comm in (self, *self._parts):
            with suppress(Exception):  # a group that is gone cannot be aborted
                comm._group.abort()


def _in_order(options: Any) -> Any:
    """Returns the options of a call that runs in the caller's stream."""
    with suppress(AttributeError):  # older versions of torch do not have the option
        options.asyncOp = False
    return options
