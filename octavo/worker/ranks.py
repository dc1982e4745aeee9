"""`Ranks`: the other processes of a model that is split, as their parent sees them. `RankedRunner`: one executor out of all of them.

    rank 0     in the engine's own process: it makes the result of a step
    the rest   get every plan and its masks through a pipe, before rank 0 begins with it

A rank that ends, or does not come to a meeting within the time limit, ends the group: the parent raises `RankLost`, which the engine
does not survive. Who supervises the engine starts all of it again.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from octavo import errors, log
from octavo.child import command
from octavo.errors import OctavoError, RankLost
from octavo.layers.shared_comm import SharedMemoryComm
from octavo.log import logger
from octavo.messages import StepPlan
from octavo.policy.cache_spec import CacheGeometry
from octavo.worker.context_groups import ContextGroups
from octavo.worker.executor import Masks, Promise
from octavo.worker.facts import Facts
from octavo.worker.machine import allowed_cpus, keep_to, share_of_cpus
from octavo.worker.model_runner import ModelRunner
from octavo.worker.rank_process import Forward, RankOrders, Reason, encode, sample

OnLost = Callable[[OctavoError], None]
START_SECONDS = 3600.0  # that the last rank may need longer than the first to load its part
STEP_SECONDS = 60.0  # that ranks may wait for another in a step
END_SECONDS = 5.0  # that ranks have to end by themselves


class Peer:
    """One other rank. A thread listens to it."""

    def __init__(self, orders: RankOrders, on_end: "Callable[[Peer], None]") -> None:
        self.rank = orders.rank
        self.ready = threading.Event()  # or ended
        self.ended = False
        self._reason = b""
        self._on_end = on_end
        self._process = subprocess.Popen(
            command("octavo.worker.rank_process", "main", os.getpid()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[memory for memory in (orders.memory, orders.context_memory) if memory is not None],
        )
        threading.Thread(target=self._listen, name=f"rank {self.rank}", daemon=True).start()
        self.tell(msgspec.json.encode(orders) + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message)
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self.why() from error

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._reason = line.strip()
            if not self._reason:
                self.ready.set()
        self._process.wait()
        self.ended = True
        self.ready.set()
        self._on_end(self)

    def why(self) -> OctavoError:
        """Returns why it ended, as it said itself, or else by its exit code."""
        with suppress(msgspec.DecodeError):
            reason = msgspec.json.decode(self._reason, type=Reason)
            kind = getattr(errors, reason.kind, RankLost)
            return (kind if kind in (errors.ConfigError, errors.LoadError) else RankLost)(f"rank {self.rank}: {reason.message}")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        code = self._process.returncode
        how = "does not answer" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return RankLost(f"rank {self.rank} {how}")

    def stop(self) -> None:
        """Ends it, by itself if it can."""
        with suppress(OSError, ValueError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Ranks:
    """All ranks but the first."""

    def __init__(self, facts: Facts, geometry: CacheGeometry, first: "First", on_lost: OnLost) -> None:
        comm = self._comm = first.comm
        self._groups = first.groups
        self._on_lost = on_lost
        self._ready = False
        self._stopping = False
        level = "DEBUG" if logger.isEnabledFor(10) else "WARNING"  # what a rank tells of its start, the first has told
        self.peers = [
            Peer(
                RankOrders(
                    config=facts.config,
                    path=str(facts.source.path),
                    kind=facts.source.kind,
                    name=facts.source.name,
                    rank=rank,
                    weights=facts.fingerprint(),
                    cpus=share_of_cpus(rank, comm.size, first.cpus),
                    memory=first.descriptor,
                    context_memory=first.groups.memory(rank),
                    start_seconds=START_SECONDS,
                    step_seconds=STEP_SECONDS,
                    geometry=geometry,
                    log_level=level,
                    log_format=log.form(),
                ),
                self._on_end,
            )
            for rank in range(1, comm.size)
        ]

    def _on_end(self, peer: Peer) -> None:
        """Nobody waits for a rank that is gone."""
        if not self._stopping:
            self._comm.abort()
            self._groups.abort()
            if self._ready:
                self._on_lost(peer.why())

    def wait_until_ready(self) -> None:
        for peer in self.peers:
            peer.ready.wait()
            if peer.ended:
                raise peer.why()
        self._comm.wait_at_most(STEP_SECONDS)
        self._groups.wait_at_most(STEP_SECONDS)
        self._ready = True

    def tell(self, message: bytes) -> None:
        for peer in self.peers:
            peer.tell(message)

    def explained(self, error: BaseException) -> BaseException:
        """Returns the reason of a rank that ended, if that is behind this error."""
        gone = next((peer for peer in self.peers if peer.ended), None)
        return gone.why() if gone is not None and isinstance(error, RankLost) else error

    def stop(self) -> None:
        self._stopping = True
        for peer in self.peers:
            peer.stop()


class RankedRunner:
    """Carries out plans on all ranks. The result is that of the first."""

    def __init__(self, runner: ModelRunner, ranks: Ranks, first: "First") -> None:
        self.runner = runner
        self._ranks = ranks
        self._first = first

    def forward(self, plan: StepPlan) -> None:
        self._ranks.tell(encode(Forward(plan)))
        try:
            self.runner.forward(plan)
        except RankLost as error:
            raise self._ranks.explained(error) from error

    def sample(self, masks: Masks | None = None) -> Promise:
        self._ranks.tell(encode(sample(masks)))
        return self.runner.sample(masks)

    def stop(self) -> None:
        self._ranks.stop()
        self.runner.stop()
        self._first.leave()


class First:
    """The first rank's end of the memory through which ranks meet. The thread that makes it keeps to the first rank's CPUs."""

    def __init__(self, size: int, context: int = 1) -> None:
        """`context`: the ranks of a group that shares a context"""
        self.cpus = allowed_cpus()
        self.descriptor = SharedMemoryComm.create(size)
        self.comm = SharedMemoryComm.join(self.descriptor, 0, size, START_SECONDS)
        self.groups = ContextGroups(size, context, START_SECONDS)
        keep_to(share_of_cpus(0, size, self.cpus))

    def leave(self) -> None:
        """Gives the CPUs back, and the memory, when nobody uses it any more."""
        keep_to(self.cpus)
        os.close(self.descriptor)
        self.groups.close()


def with_ranks(
    facts: Facts, geometry: CacheGeometry, first: First, build: Callable[[], ModelRunner], on_lost: OnLost = lambda error: None
) -> RankedRunner:
    """Returns a runner of all ranks, which load their parts at the same time. They meet when they warm up.

    `on_lost`: called in a thread with the reason when a rank ends that was ready, also where no step is under way
    """
    ranks = Ranks(facts, geometry, first, on_lost)
    try:
        runner = build()
        ranks.wait_until_ready()
    except BaseException as error:
        ranks.stop()
        raise ranks.explained(error) from error
    return RankedRunner(runner, ranks, first)
