"""What ranks say to each other, and the version for one rank, which is silence.

A layer is given its `Comm` when it is built and calls it whether there are others or not.
"""

from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, joined along the last dimension in rank order."""

    def send(self, x: Tensor, rank: int) -> None: ...

    def recv(self, x: Tensor, rank: int) -> Tensor:
        """Fills and returns x."""

    def broadcast_ids(self, ids: Tensor) -> Tensor:
        """Rank 0's ids, on every rank: sampled tokens are all that ranks need to tell each other."""


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
