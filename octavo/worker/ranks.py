"""`Ranks`: the other processes of a model that is split, as their parent sees them. `RankedRunner`: one executor out of all of them.

    rank 0     in the engine's own process, in the first stage
    the rest   get every plan and its masks, before rank 0 begins with it (`worker/rank_process.py`)

Ranks are numbered stage by stage. The result of a step is that of rank 0, or where the layers are dealt over stages, that of the
first rank of the last stage. A rank that ends, gives no sign of life, or does not come to a meeting within the time limit ends the
group: the parent raises `RankLost`, which the engine does not survive. Who supervises the engine starts all of it again.
"""

import os
import queue
import select
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from octavo import errors, log
from octavo.child import command
from octavo.config import EngineConfig
from octavo.errors import OctavoError, RankLost
from octavo.layers.shared_comm import SharedMemoryComm
from octavo.layers.socket_channel import SocketChannel
from octavo.log import logger
from octavo.messages import StepPlan, StepResult
from octavo.policy.cache_spec import CacheGeometry
from octavo.worker.executor import Masks, Promise
from octavo.worker.facts import Facts
from octavo.worker.machine import allowed_cpus, keep_to, share_of_cpus
from octavo.worker.model_runner import ModelRunner
from octavo.worker.rank_process import (
    LENGTH_BYTES,
    Answer,
    Beat,
    Diary,
    Ends,
    Failed,
    Forward,
    RankOrders,
    Ready,
    Result,
    about,
    answer,
    encode,
    join,
    sample,
)
from octavo.worker.request_table import Said
from octavo.worker.roster import Roster
from octavo.worker.tenants import Tenants

OnLost = Callable[[OctavoError], None]
START_SECONDS = 3600.0  # that the last rank may need longer than the first to load its part
STEP_SECONDS = 60.0  # that ranks of a stage may wait for each other in a step, and that a rank may give no sign of life
END_SECONDS = 5.0  # that ranks have to end by themselves


class Peer(Protocol):
    """One other rank. It calls `on_answer(peer, answer)` with what the rank says, and `on_end(peer)` once when it is gone."""

    rank: int
    ended: bool

    def tell(self, message: bytes) -> None: ...

    def why(self) -> OctavoError:
        """Returns why it ended."""

    def stop(self) -> None:
        """Ends it, by itself if it can."""


class ProcessPeer:
    """A rank that is a process of this host. A thread listens to it."""

    def __init__(self, orders: RankOrders, on_answer: "Callable[[Peer, Answer], None]", on_end: Callable[[Peer], None]) -> None:
        self.rank = orders.rank
        self.ended = False
        self._seconds = orders.step_seconds
        self._silent = False
        self._failed: Failed | None = None
        self._on_answer = on_answer
        self._on_end = on_end
        self._process = subprocess.Popen(
            command("octavo.worker.rank_process", "main", os.getpid()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=orders.ends.open_ones(),
            bufsize=0,
        )
        self._listener = threading.Thread(target=self._listen, name=f"rank {self.rank}", daemon=True)
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

    def _listen(self) -> None:
        limit = None  # until it is ready it may take as long as it likes
        while (body := self._read(limit)) is not None:
            message = answer(body)
            if isinstance(message, Ready):
                limit = self._seconds
            if isinstance(message, Failed):
                self._failed = message
            else:
                self._on_answer(self, message)
        if self._silent:
            self._process.kill()
        self._process.wait()
        self.ended = True
        self._on_end(self)

    def _read(self, limit: float | None) -> bytes | None:
        """Returns the next message, or None if the rank has ended or is silent for too long."""
        head = self._read_bytes(LENGTH_BYTES, limit)
        return None if head is None else self._read_bytes(int.from_bytes(head, "little"), limit)

    def _read_bytes(self, count: int, limit: float | None) -> bytes | None:
        assert self._process.stdout is not None
        pipe, found = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while len(found) < count:
            if not poll.poll(None if limit is None else limit * 1000):
                self._silent = True
                return None
            piece = os.read(pipe, count - len(found))
            if not piece:
                return None
            found += piece
        return found

    def why(self) -> OctavoError:
        """Returns why it ended, as it said itself, or else by its exit code."""
        if self._silent:
            return RankLost(f"rank {self.rank} did not answer for {self._seconds:g} s")
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
        self._listener.join(END_SECONDS)  # what it said last is heard


def failed(rank: int, why: Failed) -> OctavoError:
    """Returns the error that a rank ended with. What the user can mend keeps its kind."""
    kind = getattr(errors, why.kind, RankLost)
    return (kind if kind in (errors.ConfigError, errors.LoadError) else RankLost)(f"rank {rank}: {why.message}")


class Meeting:
    """What the ranks of one host meet through. The thread that makes it keeps to the CPUs of rank 0."""

    def __init__(self, config: EngineConfig) -> None:
        size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
        memories = [SharedMemoryComm.create(size) if size > 1 else -1 for _ in range(stages)]
        pairs = [SocketChannel.pair() for _ in range(size * (stages - 1))]  # pair r leads from rank r to rank r + size
        befores, afters = [-1] * size + [end for _, end in pairs], [end for end, _ in pairs] + [-1] * size
        self.ends = [Ends(memories[rank // size], befores[rank], afters[rank]) for rank in range(config.num_ranks)]
        self.cpus = allowed_cpus()
        self.place = join(self.ends[0], 0, config, START_SECONDS)
        self._groups = [SharedMemoryComm.join(memory, 0, size, START_SECONDS) for memory in memories if memory >= 0]
        keep_to(share_of_cpus(0, config.num_ranks, self.cpus))

    def give_out(self) -> None:
        """Closes what other ranks have inherited: a rank that is gone must be the last to hold its end."""
        for end in {end for ends in self.ends[1:] for end in ends.open_ones()} - {self.ends[0].memory}:
            with suppress(OSError):
                os.close(end)

    def wait_at_most(self, seconds: float) -> None:
        if isinstance(self.place.comm, SharedMemoryComm):
            self.place.comm.wait_at_most(seconds)

    def abort(self) -> None:
        """Nobody waits for anybody any more."""
        for group in self._groups:
            group.abort()
        if isinstance(self.place.after, SocketChannel):
            self.place.after.shut_down()

    def leave(self) -> None:
        """Gives the CPUs back, and the memory, when nobody uses it any more."""
        keep_to(self.cpus)
        if self.ends[0].memory >= 0:
            os.close(self.ends[0].memory)
        if isinstance(self.place.after, SocketChannel):
            self.place.after.close()


class Ranks:
    """All ranks but the first."""

    def __init__(self, facts: Facts, geometry: CacheGeometry, meeting: Meeting, on_lost: OnLost) -> None:
        self._meeting = meeting
        self._on_lost = on_lost
        self._ready = threading.Event()  # all are, or one has ended
        self._stopping = False
        self.about: dict[int, Ready] = {}  # what each rank is
        self.roster: Roster | None = None  # once all are ready
        self.results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()  # of steps; None: a rank is gone
        level = "DEBUG" if logger.isEnabledFor(10) else "WARNING"  # what a rank tells of its start, the first has told
        count = facts.config.num_ranks
        self.peers: list[Peer] = []
        for rank in range(1, count):
            orders = RankOrders(
                config=facts.config,
                path=str(facts.source.path),
                kind=facts.source.kind,
                name=facts.source.name,
                rank=rank,
                weights=facts.fingerprint(),
                cpus=share_of_cpus(rank, count, meeting.cpus),
                ends=meeting.ends[rank],
                start_seconds=START_SECONDS,
                step_seconds=STEP_SECONDS,
                geometry=geometry,
                log_level=level,
                log_format=log.form(),
            )
            self.peers.append(ProcessPeer(orders, self._on_answer, self._on_end))
        meeting.give_out()

    def _on_answer(self, peer: Peer, message: Answer) -> None:
        if isinstance(message, Ready):
            self.about[peer.rank] = message
            if len(self.about) == len(self.peers):
                self._ready.set()
        elif isinstance(message, Result):
            self.results.put(message.result)
        elif isinstance(message, Beat) and self.roster is not None:
            self.roster.hear(peer.rank, message)

    def _on_end(self, peer: Peer) -> None:
        """Nobody waits for a rank that is gone."""
        if not self._stopping:
            was_ready = len(self.about) == len(self.peers)
            self.give_up()
            if was_ready:
                self._on_lost(peer.why())

    def give_up(self) -> None:
        self._meeting.abort()
        self.results.put(None)
        self._ready.set()

    def wait_until_ready(self) -> None:
        self._ready.wait()
        gone = next((peer for peer in self.peers if peer.ended), None)
        if gone is not None:
            raise gone.why()
        self._meeting.wait_at_most(STEP_SECONDS)

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
    """Carries out plans on all ranks."""

    def __init__(self, runner: ModelRunner, ranks: Ranks, meeting: Meeting, roster: Roster) -> None:
        self.runner = runner
        self.ranks = ranks
        self.roster = ranks.roster = roster
        self._diary = Diary()
        roster.follow(self._diary)
        self._meeting = meeting
        self._stages = meeting.place.stage.count
        self._tenants = Tenants()
        self._said: list[Said] = []  # by the last stage, since the last plan
        self._plan = StepPlan(0)

    def forward(self, plan: StepPlan) -> None:
        said, self._said, self._plan = self._said, [], plan
        self._tenants.apply(plan)
        self._diary.begin(plan.step)
        with self._as_one():
            self.ranks.tell(encode(Forward(plan, said)))
            self.runner.table.learn(said)
            self.runner.forward(plan)

    def sample(self, masks: Masks | None = None) -> Promise:
        with self._as_one():
            self.ranks.tell(encode(sample(masks)))
            own = self.runner.sample(masks)
        self._diary.end()
        return own if self._stages == 1 else Awaited(self, self._plan)

    def result(self, plan: StepPlan) -> StepResult:
        """Waits for the result of a step from the last stage. Steps end in the order in which they began."""
        result = self.ranks.results.get()
        if result is None:
            self.ranks.results.put(None)
            raise self.ranks.explained(RankLost("the ranks gave up"))
        self._said += self._tenants.said(plan, result)
        return result

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        """The rows of all ranks have to stay the same: what stops this rank in the middle of a step ends the group."""
        try:
            yield
        except RankLost as error:
            raise self.ranks.explained(error) from error
        except BaseException as error:
            self.ranks.give_up()
            if isinstance(error, Exception):
                raise RankLost(f"rank 0: {error}") from error
            raise

    def stop(self) -> None:
        self.ranks.stop()
        self.roster.close()
        self.runner.stop()
        self._meeting.leave()


@dataclass(frozen=True, slots=True)
class Awaited:
    """The result of a step that another stage ends."""

    runner: RankedRunner
    plan: StepPlan

    def result(self) -> StepResult:
        return self.runner.result(self.plan)


def with_ranks(
    facts: Facts, geometry: CacheGeometry, meeting: Meeting, build: Callable[[], ModelRunner], on_lost: OnLost = lambda error: None
) -> RankedRunner:
    """Returns a runner of all ranks, which load their parts at the same time. They meet when they warm up.

    `on_lost`: called in a thread with the reason when a rank ends that was ready, also where no step is under way
    """
    ranks = Ranks(facts, geometry, meeting, on_lost)
    try:
        runner = build()
        ranks.wait_until_ready()
    except BaseException as error:
        ranks.stop()
        raise ranks.explained(error) from error
    first = about(0, share_of_cpus(0, facts.config.num_ranks, meeting.cpus), facts, runner)
    roster = Roster([first, *(ranks.about[peer.rank] for peer in ranks.peers)], facts.config.pipeline_parallel_size)
    roster.log()
    return RankedRunner(runner, ranks, meeting, roster)
