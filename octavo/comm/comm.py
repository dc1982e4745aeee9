"""How ranks communicate, and the version for one rank, which does nothing.

    Comm       all ranks that share the matrices of a layer
    Channel    one rank and its neighbour in the next stage of a pipeline

A layer receives its `Comm` when it is built, and calls it even if there is only one rank.
"""

from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of x over all ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns x of all ranks, concatenated along the last dimension in rank order."""

    def wait_at_most(self, seconds: float) -> None:
        """Sets how long a rank waits for others in a collective operation."""


class NullComm:
    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def wait_at_most(self, seconds: float) -> None:
        pass


NOBODY = NullComm()


class Channel(Protocol):
    def send(self, x: Tensor) -> None: ...

    def receive(self, x: Tensor) -> Tensor:
        """Fills and returns x."""

