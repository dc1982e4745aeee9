"""How ranks communicate, and the version for one rank, which does nothing.

A layer is given its `Comm` when it is built, and calls it even if there is only one rank.
"""

from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of x over all ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns x of all ranks, joined along the last dimension in rank order."""

    def send(self, x: Tensor, rank: int) -> None: ...

    def recv(self, x: Tensor, rank: int) -> Tensor:
        """Fills and returns x."""

    def broadcast_ids(self, ids: Tensor) -> Tensor:
        """Returns the ids of rank 0 on every rank. Ranks have to exchange nothing else between steps."""


class NullComm:
    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def send(self, x: Tensor, rank: int) -> None:
        raise RuntimeError(f"cannot send to rank {rank}: this is the only rank")

    def recv(self, x: Tensor, rank: int) -> Tensor:
        raise RuntimeError(f"cannot receive from rank {rank}: this is the only rank")

    def broadcast_ids(self, ids: Tensor) -> Tensor:
        return ids
