"""Rank processes of one host, as seen by the parent, and the interfaces of ranks and process groups in general.

    Peer       one other rank: `ProcessPeer`, or an actor on another host (`worker/ray_ranks.py`)
    Meeting    the process group: `HostMeeting` uses shared memory and unnamed sockets, so that no port is opened.
               In a `GpuMeeting` each rank has a GPU, and ranks communicate through NCCL
"""

import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from octavo import errors
from octavo.child import command, is_stopped
from octavo.comm.gloo import GlooComm
from octavo.comm.nccl import NcclComm
from octavo.comm.shared_memory import SharedMemoryComm
from octavo.comm.socket_channel import SocketChannel
from octavo.config import Debug, EngineConfig
from octavo.errors import ConfigError, OctavoError, RankLost
from octavo.worker.machine import allowed_cpus, keep_to, share_of_cpus
from octavo.worker.places import FILE, LOCAL, Ends, join, nccl_place, place_of
from octavo.worker.program import Place
from octavo.worker.rank_process import LENGTH_BYTES, Answer, Failed, RankOrders, Ready, answer

START_SECONDS = 3600.0  # how much longer than the first the last rank may take to load its part
END_SECONDS = 5.0  # time for ranks to end by themselves
LOOK_SECONDS = 0.5  # interval of checks whether a rank that sends nothing was stopped


class Peer(Protocol):
    """One other rank. It calls `on_answer(peer, answer)` for each message of the rank, and `on_end(peer)` once when the rank is gone."""

    rank: int
    ended: bool

    def tell(self, message: bytes) -> None: ...

    def why(self) -> OctavoError:
        """Returns the reason why it ended."""

    def stop(self) -> None:
        """Ends the rank, gracefully if possible."""


OnAnswer = Callable[[Peer, Answer], None]
OnEnd = Callable[[Peer], None]


class ListeningPeer:
    """A peer with a thread that reads its messages until there are no more."""

    def __init__(self, orders: RankOrders, on_answer: OnAnswer, on_end: OnEnd) -> None:
        self.rank = orders.rank
        self.ended = False
        self._seconds = orders.step_seconds
        self._failed: Failed | None = None  # the reason why it ended, if it sent one
        self._on_answer, self._on_end = on_answer, on_end
        self._listener = threading.Thread(target=self._listen, name=f"rank {self.rank}", daemon=True)

    def _listen(self) -> None:
        limit = None  # no time limit until it is ready
        while body := self._next(limit):
            message = answer(body)
            if isinstance(message, Ready):
                limit = self._seconds
            if isinstance(message, Failed):
                self._failed = message
            else:
                self._on_answer(self, message)
        self._see_end()
        self.ended = True
        self._on_end(self)

    def _next(self, limit: float | None) -> bytes | None:
        """Returns the next message, or None if the rank has ended or sends nothing for this many seconds."""
        raise NotImplementedError

    def _see_end(self) -> None:
        """Called when there are no more messages."""

    def tell(self, message: bytes) -> None:
        raise NotImplementedError

    def why(self) -> OctavoError:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError


class ProcessPeer(ListeningPeer):
    """A rank that is a process on this host."""

    def __init__(self, orders: RankOrders, on_answer: OnAnswer, on_end: OnEnd) -> None:
        super().__init__(orders, on_answer, on_end)
        self._fault = ""  # why it is killed, if it is
        self._process = subprocess.Popen(
            command("octavo.worker.rank_process", "main", os.getpid()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=orders.ends.open_ones(),
            bufsize=0,
        )
        self._listener.start()
        self.tell(msgspec.json.encode(orders) + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: bytes) -> None:
        assert self._process.stdin is not None
        try:
            view = memoryview(message)
            while view:
                view = view[self._process.stdin.write(view) :]
        except (OSError, ValueError) as error:
            raise self.why() from error

    def _see_end(self) -> None:
        if self._fault:
            self._process.kill()
        self._process.wait()

    def _next(self, limit: float | None) -> bytes | None:
        head = self._read_bytes(LENGTH_BYTES, limit)
        return None if head is None else self._read_bytes(int.from_bytes(head, "little"), limit)

    def _read_bytes(self, count: int, limit: float | None) -> bytes | None:
        assert self._process.stdout is not None
        pipe, found = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while len(found) < count:
            if not self._waits_for(poll, limit):
                return None
            piece = os.read(pipe, count - len(found))
            if not piece:
                return None
            found += piece
        return found

    def _waits_for(self, poll: select.poll, limit: float | None) -> bool:
        """Waits until there is something to read. Returns False if the rank was stopped, or sends nothing for this many seconds."""
        until = None if limit is None else time.monotonic() + limit
        while not poll.poll(LOOK_SECONDS * 1000):
            if is_stopped(self.pid):  # a rank that only waits for a CPU is not
                self._fault = "was stopped"
            elif until is not None and time.monotonic() > until:
                self._fault = f"did not answer for {self._seconds:g} s"
            if self._fault:
                return False
        return True

    def why(self) -> OctavoError:
        """Returns the reason why it ended: its own message, or else its exit code."""
        if self._fault:
            return RankLost(f"rank {self.rank} {self._fault}")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        if self._failed is not None:
            return failed(self.rank, self._failed)
        code = self._process.returncode
        how = "does not answer" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return RankLost(f"rank {self.rank} {how}")

    def stop(self) -> None:
        with suppress(OSError, ValueError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(END_SECONDS)  # its last messages are still read


def failed(rank: int | str, why: Failed) -> OctavoError:
    """Returns the error that a rank ended with. Errors that the user can fix keep their class."""
    kind = getattr(errors, why.kind, RankLost)
    return (kind if kind in (errors.ConfigError, errors.LoadError, errors.VerifyError) else RankLost)(f"rank {rank}: {why.message}")


class Meeting(Protocol):
    """The process group of all ranks. The process that creates it is rank 0, and is bound to its CPUs."""

    place: Place
    alike: bool  # all ranks share the memory that rank 0 detects

    def cpus_of(self, rank: int) -> list[int]: ...

    def peer(self, orders: RankOrders, on_answer: OnAnswer, on_end: OnEnd) -> Peer:
        """Starts a rank."""

    def give_out(self) -> None:
        """Called when all ranks have started."""

    def wait_at_most(self, seconds: float) -> None: ...

    def abort(self) -> None:
        """Ends all waiting between ranks."""

    def leave(self) -> None:
        """Frees everything, once no rank uses it."""


class HostMeeting:
    """The process group of ranks on one host. The thread that creates it is bound to the CPUs of rank 0."""

    alike = True

    def __init__(self, config: EngineConfig, shares_memory: bool = True) -> None:
        """`shares_memory`: ranks of a stage communicate through shared memory"""
        size, count, shares = config.tensor_parallel_size, config.num_ranks, config.decode_context_parallel_size
        memories, contexts = (_memories(count, each if shares_memory else 1) for each in (size, shares))
        pairs = [SocketChannel.pair() for _ in range(count - size)]  # pair r connects rank r with rank r + size
        befores, afters = [-1] * size + [end for _, end in pairs], [end for end, _ in pairs] + [-1] * size
        self.ends = [Ends(*ends) for ends in zip(memories, contexts, befores, afters)]
        self._inherited = {end for ends in self.ends for end in ends.open_ones()} - {self.ends[0].after}
        self.cpus = allowed_cpus()
        self.place = self._join(config)
        self._groups = [  # of all stages and contexts, to abort them
            SharedMemoryComm.join(memory, 0, size, START_SECONDS)
            for memory, size in {*((memory, size) for memory in memories), *((memory, shares) for memory in contexts)}
            if memory >= 0
        ]
        self._count = count
        keep_to(self.cpus_of(0))

    def _join(self, config: EngineConfig) -> Place:
        """Returns the rank context of rank 0."""
        return join(self.ends[0], 0, config, START_SECONDS)

    def cpus_of(self, rank: int) -> list[int]:
        return share_of_cpus(rank, self._count, self.cpus)

    def peer(self, orders: RankOrders, on_answer: OnAnswer, on_end: OnEnd) -> Peer:
        own = msgspec.structs.replace(orders, ends=self.ends[orders.rank])
        return ProcessPeer(own, on_answer, on_end)

    def give_out(self) -> None:
        """Closes the descriptors that the ranks inherited: when a rank ends, no other process may hold its end open."""
        while self._inherited:
            os.close(self._inherited.pop())

    def wait_at_most(self, seconds: float) -> None:
        self.place.wait_at_most(seconds)

    def abort(self) -> None:
        """Ends all waiting between ranks."""
        for group in self._groups:
            group.abort()
        if isinstance(self.place.after, SocketChannel):
            self.place.after.shut_down()

    def leave(self) -> None:
        """Restores the CPU affinity and frees the memory, once no rank uses it."""
        keep_to(self.cpus)
        self.give_out()
        if isinstance(self.place.after, SocketChannel):
            self.place.after.close()


def _memories(ranks: int, size: int) -> list[int]:
    """Returns for each rank the descriptor of its group's shared memory. -1: groups have one rank"""
    made = [SharedMemoryComm.create(size) if size > 1 else -1 for _ in range(ranks // size)]
    return [made[rank // size] for rank in range(ranks)]


# -- a GPU each
#
#     rank 0     the first GPU, in the engine's own process
#     rank r     the r-th GPU that CUDA shows
#
# Stages of a pipeline pass hidden states through the host, so their steps are not captured. With `OCTAVO_DEBUG=comm=gloo` all ranks
# share the first GPU and communicate through local connections: to test results, not speed.


class GpuMeeting(HostMeeting):
    alike = False  # GPUs may differ, and other processes may use some of their memory

    def __init__(self, config: EngineConfig, debug: Debug) -> None:
        check_gpus(config, debug)
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-")
        self._whole: NcclComm | GlooComm
        if debug.comm == "gloo":
            self._whole = GlooComm.create(LOCAL, config.num_ranks, START_SECONDS)
            self._address = self._whole.address
        else:
            store = str(Path(self._folder.name) / "store")
            self._whole, self._address = NcclComm.join(store, 0, config.num_ranks), f"{FILE}{store}"
        super().__init__(config, shares_memory=False)

    def _join(self, config: EngineConfig) -> Place:
        if isinstance(self._whole, GlooComm):
            return place_of(self._whole, config, on_host=config.num_ranks)
        return nccl_place(self._whole, self.ends[0], config)

    def peer(self, orders: RankOrders, on_answer: OnAnswer, on_end: OnEnd) -> Peer:
        return ProcessPeer(msgspec.structs.replace(orders, ends=self.ends[orders.rank], address=self._address), on_answer, on_end)

    def abort(self) -> None:
        self._whole.abort()
        super().abort()

    def leave(self) -> None:
        super().leave()
        self._whole.abort()
        self._folder.cleanup()


def check_gpus(config: EngineConfig, debug: Debug) -> None:
    """Refuses more ranks than GPUs, before anything starts."""
    there = torch.cuda.device_count()
    if config.num_ranks > there and debug.comm != "gloo":
        sizes = f"tensor_parallel_size {config.tensor_parallel_size} and pipeline_parallel_size {config.pipeline_parallel_size}"
        raise ConfigError(f"{sizes} need {config.num_ranks} GPUs, and CUDA shows {there}: lower them, or set device to cpu")


def alone_with_nccl() -> Place:
    """Returns the rank context of a single rank that calls NCCL nevertheless, to measure its cost."""
    return Place(NcclComm.join(str(Path(tempfile.mkdtemp(prefix="octavo-")) / "store"), 0, 1))
