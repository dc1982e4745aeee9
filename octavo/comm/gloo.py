"""Ranks on several hosts, which communicate through TCP connections of torch's gloo.

    comm = GlooComm.create(host, size, seconds)                    rank 0: it listens at `comm.address`, to which the others connect
    comm = GlooComm.join(address, host, rank, size, seconds)       each other rank; `host` is its own address, as seen by the others

Ranks connect at their first collective operation. A rank that waits longer than the limit raises RankLost; the group cannot be used
after that. Connections are not authenticated: restrict the ports to a private network.
"""

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from octavo.errors import RankLost

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
STORE_SECONDS = 30.0  # minimum time for a rank to connect to its own store
LOOK_SECONDS = 0.5  # a waiting rank checks at this interval whether it was aborted
POLL_SECONDS = 0.02  # interval of checks for missing ranks


class GlooComm:
    """One rank's end of a group. `store`: through which ranks find each other. `host`: the address at which this rank listens."""

    def __init__(self, store: Store, host: str, rank: int, size: int, timeout_seconds: float, address: str = "") -> None:
        self.rank = rank
        self.size = size
        self.seconds = timeout_seconds
        self.address = address
        self._store = store
        self._host = host
        self._group: Any = None
        self._parts: list[GlooComm] = []  # these share its time limit
        self._ends: list[GlooComm] = []  # of channels, which keep their own limit: a neighbour may compute for a long time
        self._channels: dict[int, GlooChannel] = {}
        self._gave_up = False

    @staticmethod
    def create(host: str, size: int, timeout_seconds: float) -> "GlooComm":
        """Returns the first rank of a group. It listens only at this address of the host, at a free port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        limit = timedelta(seconds=max(timeout_seconds, STORE_SECONDS))
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=limit)
        return GlooComm(store, host, 0, size, timeout_seconds, f"{host}:{port}")

    @staticmethod
    def join(address: str, host: str, rank: int, size: int, timeout_seconds: float) -> "GlooComm":
        first, _, port = address.rpartition(":")
        try:
            store = TCPStore(first, int(port), is_master=False, timeout=timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise RankLost(f"rank {rank} on {host} does not reach rank 0 at {address}") from error
        return GlooComm(store, host, rank, size, timeout_seconds, address)

    def part(self, name: str, ranks: Sequence[int]) -> "GlooComm":
        """Returns a group of some of these ranks, in this order. All of them must call it with the same name."""
        part = self._part(f"part {name}", ranks)
        self._parts.append(part)
        return part

    def _part(self, name: str, ranks: Sequence[int]) -> "GlooComm":
        store = PrefixStore(name, self._store)
        return GlooComm(store, self._host, list(ranks).index(self.rank), len(ranks), self.seconds, self.address)

    def channel(self, rank: int) -> "GlooChannel":
        """Returns the connection to one other rank, which must call it with the number of this one."""
        if rank not in self._channels:
            there, back = (self._part(f"from {one} to {other}", [one, other]) for one, other in ((self.rank, rank), (rank, self.rank)))
            self._ends += [there, back]
            self._channels[rank] = GlooChannel(there, back, connects_out_first=self.rank < rank)
        return self._channels[rank]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds in float32 and in rank order, and rounds once: every rank gets the same bits, in any order of arrival."""
        if x.dtype not in SUMMED:
            raise ValueError(f"ranks add floats of at most 32 bits, not {x.dtype}")
        first, *others = self._of_all(x)
        total = first.to(torch.float32)
        for other in others:
            total = total + other
        return total.to(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._of_all(x), dim=-1).to(x.device)

    def wait_at_most(self, seconds: float) -> None:
        self.seconds = seconds
        for part in self._parts:
            part.wait_at_most(seconds)

    def abort(self) -> None:
        """Ends the waiting of this rank. The others notice when its process ends."""
        self._gave_up = True
        for part in self._parts + self._ends:
            part.abort()

    def connect(self) -> None:
        """Waits until all ranks are available, and connects to them."""
        if self._group is not None:
            return
        until, missing = time.monotonic() + self.seconds, [rank for rank in range(self.size) if rank != self.rank]
        try:
            self._store.set(f"rank {self.rank}", "here")
            while missing := [rank for rank in missing if not self._store.check([f"rank {rank}"])]:
                if self._gave_up or time.monotonic() > until:
                    raise self._lost(f"did not meet rank {', '.join(map(str, missing))} within {self.seconds:g} s")
                time.sleep(POLL_SECONDS)
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=max(until - time.monotonic(), 1.0))
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            self._group = ProcessGroupGloo(self._store, self.rank, self.size, options)
        except RuntimeError as error:  # torch raises no class of its own
            raise error if isinstance(error, RankLost) else self._lost(f"could not connect: {_first_line(error)}") from error

    def _of_all(self, x: Tensor) -> list[Tensor]:
        """Returns x of every rank, on the host."""
        mine = x.cpu().contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        if mine.numel() == 0:
            return everyone
        options = AllgatherOptions()
        options.timeout = self._limit
        self.connect()
        self._meet(self._group.allgather, [[_bytes(one) for one in everyone]], [_bytes(mine)], options)
        return everyone

    def _broadcast(self, x: Tensor, root: int) -> None:
        self._finish(self._start_broadcast(x, root))

    def _start_broadcast(self, x: Tensor, root: int) -> Any:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, self._limit
        self.connect()
        return self._started(self._group.broadcast, [_bytes(x)], options)

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.seconds)

    def _meet(self, call: Any, *arguments: Any) -> None:
        self._finish(self._started(call, *arguments))

    def _started(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise self._lost(_first_line(error)) from error

    def _finish(self, work: Any) -> None:
        """Waits in intervals, so that this rank can be aborted."""
        until = time.monotonic() + self.seconds
        while True:
            ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=min(LOOK_SECONDS, self.seconds)))
                return
            except RuntimeError as error:
                if not ended and work.is_completed():
                    continue  # it ended at the same moment: the next check has its result
                if time.monotonic() > until or "Timed out" in str(error):
                    raise self._lost(f"did not meet the others within {self.seconds:g} s") from error
                if ended or self._gave_up:
                    raise self._lost(f"lost the others: {_first_line(error)}") from error

    def _lost(self, how: str) -> RankLost:
        return RankLost(f"rank {self.rank} gave up" if self._gave_up else f"rank {self.rank} {how}")


class GlooChannel:
    """The connection to one other rank. Each direction is a group of two, so that they never wait for each other."""

    def __init__(self, there: GlooComm, back: GlooComm, connects_out_first: bool) -> None:
        self._out, self._in = there, back
        self._ends = (there, back) if connects_out_first else (back, there)  # in the same order on both sides
        self._under_way: tuple[Any, Tensor] | None = None  # the last send, and its memory

    def send(self, x: Tensor) -> None:
        """Sends a copy of x. It waits until the previous one has arrived."""
        copy = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._connect()
        if self._under_way is not None:
            self._out._finish(self._under_way[0])
        self._under_way = self._out._start_broadcast(copy, 0), copy

    def receive(self, x: Tensor) -> Tensor:
        """Fills and returns x."""
        self._connect()
        if x.device.type == "cpu" and x.is_contiguous():
            self._in._broadcast(x, 0)
            return x
        copy = torch.empty_like(x, device="cpu", memory_format=torch.contiguous_format)
        self._in._broadcast(copy, 0)
        return x.copy_(copy)

    def _connect(self) -> None:
        for end in self._ends:
            end.connect()


def _bytes(x: Tensor) -> Tensor:
    """Returns a tensor as bytes, which gloo moves without interpreting them."""
    return x.view(-1).view(torch.uint8)


def _first_line(error: BaseException) -> str:
    """Returns gloo's message, without the source location."""
    line = str(error).strip().partition("\n")[0]
    return line.rpartition("] ")[2].partition(". This is")[0][:160] if line.startswith("[") else line[:160]
