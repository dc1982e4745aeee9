"""Sends hidden states from one stage of a pipeline to the next, through a pair of connected unnamed sockets.

Both ends are created by the process that starts the ranks, and inherited. When a neighbour ends, its end is closed, which the other
notices at once. There is no time limit: a neighbour may compute for a long time. The parent of the ranks ends one that hangs.
"""

import socket
from contextlib import suppress

import torch
from torch import Tensor

from octavo.errors import RankLost

BUFFER_BYTES = 1 << 22  # large enough to hand over a decode step without waiting


class SocketChannel:
    def __init__(self, descriptor: int, neighbour: int) -> None:
        """Takes ownership of the descriptor. `neighbour`: the rank at the other end, for messages"""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._neighbour = neighbour

    @staticmethod
    def pair() -> tuple[int, int]:
        """Returns the descriptors of both ends."""
        ends = socket.socketpair()
        for end in ends:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        return ends[0].detach(), ends[1].detach()

    def send(self, x: Tensor) -> None:
        try:
            self._socket.sendall(_bytes(x.to("cpu").contiguous()))
        except OSError as error:
            raise self._gone() from error

    def receive(self, x: Tensor) -> Tensor:
        """Fills and returns x, which must be contiguous."""
        target = x if x.device.type == "cpu" else torch.empty_like(x, device="cpu")
        left = _bytes(target)
        try:
            while left:
                count = self._socket.recv_into(left)
                if not count:
                    raise self._gone()
                left = left[count:]
        except OSError as error:
            raise self._gone() from error
        return x if target is x else x.copy_(target)

    def shut_down(self) -> None:
        """Ends all waiting at both ends, from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _gone(self) -> RankLost:
        return RankLost(f"rank {self._neighbour} is gone")


def _bytes(x: Tensor) -> memoryview:
    return memoryview(x.flatten().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
