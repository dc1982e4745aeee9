"""Hidden states from one stage of a pipeline to the next, through a pair of connected sockets that have no name.

Both ends are made by the process that starts the ranks, and inherited. A neighbour that ends closes its end, which the other notices
at once. There is no time limit: a neighbour may be computing for long. Who started the ranks notices one that hangs, and ends it.
"""

import socket
from contextlib import suppress

import torch
from torch import Tensor

from octavo.errors import RankLost

BUFFER_BYTES = 1 << 22  # so that a decode step is handed over without waiting


class SocketChannel:
    def __init__(self, descriptor: int, neighbour: int) -> None:
        """Takes the descriptor over. `neighbour`: the rank at the other end, for messages"""
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
        """Fills and returns x, which is contiguous."""
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
