"""`Ranks`: the other processes of a model that is split, as seen by the parent. `RankedRunner`: one executor for all of them.

    rank 0     in the engine's own process, in the first stage
    the rest   receive every plan and its masks before rank 0 executes it (`worker/rank_process.py`)

Ranks are numbered stage by stage. The result of a step is that of rank 0 or, with a pipeline, that of the first rank of the
last stage. A rank that ends, sends no heartbeat, or does not reach a collective operation within the time limit ends the
group: the parent raises `RankLost`, which stops the engine. The supervisor of the engine restarts all of it.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo import log
from octavo.errors import OctavoError, RankLost, VerifyError
from octavo.log import logger
from octavo.messages import StepPlan, StepResult
from octavo.policy.block_pool import BlockKey, Event
from octavo.policy.cache_spec import CacheGeometry
from octavo.worker.executor import Masks, Promise
from octavo.worker.facts import Facts
from octavo.worker.host_ranks import START_SECONDS, Meeting, Peer
from octavo.worker.model_runner import ModelRunner
from octavo.worker.rank_process import (
    Answer,
    Beat,
    Diary,
    Forward,
    RankOrders,
    Ready,
    Result,
    Room,
    about,
    encode,
    sample,
)
from octavo.worker.request_table import SampledToken
from octavo.worker.roster import Roster
from octavo.worker.shadow import Shadow, happened

OnLost = Callable[[OctavoError], None]
Build = Callable[[CacheGeometry], tuple[ModelRunner, Shadow | None]]
STEP_SECONDS = 60.0  # time limit for ranks of a stage to wait for each other in a step, and for a rank to send no heartbeat


class Ranks:
    """All ranks but the first."""

    def __init__(self, facts: Facts, geometry: CacheGeometry | None, meeting: Meeting, on_lost: OnLost, verify: bool = False) -> None:
        """`geometry`: of all ranks; None: they have to agree on it"""
        self.compared: dict[int, int] = {}  # numbers compared by each rank, if steps are verified
        self._meeting = meeting
        self._on_lost = on_lost
        self.rooms: dict[int, Room] = {}  # how much cache fits on each rank, if they have to agree
        self._rooms_known = threading.Event()  # set when all have reported, or when a rank has ended
        self._ready = threading.Event()  # set when all are ready, or when a rank has ended
        self._stopping = False
        self.about: dict[int, Ready] = {}  # the properties of each rank
        self.roster: Roster | None = None  # once all are ready
        self.results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()  # of steps; None: a rank is gone
        level = "DEBUG" if logger.isEnabledFor(10) else "WARNING"  # the first rank already logs the start
        self._count = facts.config.num_ranks - 1
        self.peers: list[Peer] = []
        for rank in range(1, facts.config.num_ranks):
            orders = RankOrders(
                config=facts.config,
                path=str(facts.source.path),
                kind=facts.source.kind,
                name=facts.source.name,
                rank=rank,
                weights=facts.fingerprint(),
                cpus=meeting.cpus_of(rank),
                start_seconds=START_SECONDS,
                step_seconds=STEP_SECONDS,
                geometry=geometry,
                log_level=level,
                log_format=log.form(),
                verify=verify,
            )
            self.peers.append(meeting.peer(orders, self._on_answer, self._on_end))
        meeting.give_out()

    def _on_answer(self, peer: Peer, message: Answer) -> None:
        if isinstance(message, Ready):
            self.about[peer.rank] = message
            if len(self.about) == self._count:
                self._ready.set()
        elif isinstance(message, Room):
            self.rooms[peer.rank] = message
            if len(self.rooms) == self._count:
                self._rooms_known.set()
        elif isinstance(message, Result):
            self.results.put(message.result)
        elif isinstance(message, Beat) and self.roster is not None:
            self.compared[peer.rank] = message.compared
            self.roster.hear(peer.rank, message)

    def _on_end(self, peer: Peer) -> None:
        """Aborts all waiting when a rank is gone."""
        if not self._stopping:
            was_ready = len(self.about) == self._count
            self.give_up()
            if was_ready:
                self._on_lost(peer.why())

    def give_up(self) -> None:
        self._meeting.abort()
        self.results.put(None)
        self._rooms_known.set()
        self._ready.set()

    def agree(self, own: CacheGeometry) -> CacheGeometry:
        """Returns the largest cache that fits on every rank, and sends it to them. `own`: what fits on rank 0"""
        self._rooms_known.wait()
        self._raise_if_gone()
        rooms = {0: Room.of(own)} | self.rooms
        common = Room(*(min(getattr(room, name) for room in rooms.values()) for name in Room.__struct_fields__))
        least = min(rooms, key=lambda rank: rooms[rank].num_blocks)
        if len(set(rooms.values())) > 1:
            logger.info("Rank %d has room for the fewest blocks, %d, and all ranks use as many", least, common.num_blocks)
        self.tell(encode(common))
        return common.of_rank(own)

    def wait_until_ready(self) -> None:
        self._ready.wait()
        self._raise_if_gone()
        self._meeting.wait_at_most(STEP_SECONDS)

    def _raise_if_gone(self) -> None:
        gone = next((peer for peer in self.peers if peer.ended), None)
        if gone is not None:
            raise gone.why()

    def tell(self, message: bytes) -> None:
        for peer in self.peers:
            peer.tell(message)

    def explained(self, error: BaseException) -> BaseException:
        """Returns the error of a rank that ended, if it caused this error."""
        gone = next((peer for peer in self.peers if peer.ended), None)
        return gone.why() if gone is not None and isinstance(error, RankLost) else error

    def stop(self) -> None:
        self._stopping = True
        for peer in self.peers:
            peer.stop()


class RankedRunner:
    """Executes plans on all ranks."""

    def __init__(
        self, runner: ModelRunner, geometry: CacheGeometry, ranks: Ranks, meeting: Meeting, roster: Roster, shadow: Shadow | None
    ) -> None:
        self.runner = runner
        self.geometry = geometry
        self.shadow = shadow  # of rank 0
        self.ranks = ranks
        self.roster = ranks.roster = roster
        self._diary = Diary()
        roster.follow(self._diary)
        self._meeting = meeting
        self._stages = meeting.place.stage.count
        self._owners = RowOwners()
        self._sampled: list[SampledToken] = []  # sampled by the last stage since the last plan
        self._events: list[tuple[Event, int, BlockKey | None]] = []  # of blocks, since the last plan
        self._plan = StepPlan(0)

    def on_event(self, event: Event, block: int, key: BlockKey | None) -> None:
        """Forwards a block event to all ranks with the next plan, for verification and checks."""
        self._events.append((event, block, key))
        happened(event, block, key, self.runner, self.shadow)

    def forward(self, plan: StepPlan) -> None:
        sampled, self._sampled, self._plan = self._sampled, [], plan
        events, self._events = self._events, []
        self._owners.apply(plan)
        self._diary.begin(plan.step)
        with self._as_one():
            self.ranks.tell(encode(Forward(plan, sampled, events)))
            self.runner.table.learn(sampled)
            self.runner.forward(plan)

    def sample(self, masks: Masks | None = None) -> Promise:
        with self._as_one():
            if self._plan.mask_rows:  # otherwise the ranks do not wait for a message
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
        self._sampled += self._owners.sampled_tokens(plan, result)
        return result

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        """An error that stops this rank during a step ends the group, because the rows of all ranks must stay the same."""
        try:
            yield
        except RankLost as error:
            raise self.ranks.explained(error) from error
        except BaseException as error:
            self.ranks.give_up()
            if isinstance(error, Exception) and not isinstance(error, VerifyError):
                raise RankLost(f"rank 0: {error}") from error
            raise

    def stop(self) -> None:
        """Ends all ranks, and drops every reference, so that all memory is freed."""
        self.ranks.stop()
        self.roster.close()
        self.runner.stop()
        self._meeting.leave()
        self.__dict__.clear()


class RowOwners:
    """Maps sequences to rows. A late token may belong to a row that another sequence has by now."""

    def __init__(self) -> None:
        self._row: dict[int, int] = {}  # sequence -> row
        self._sequence: dict[int, int] = {}  # row -> sequence

    def apply(self, plan: StepPlan) -> None:
        changes = [(fork.row, fork.seq_id) for fork in plan.row_forks] + [(write.row, write.seq_id) for write in plan.row_writes]
        for row, sequence in changes:
            before = self._sequence.get(row)
            if before is not None and self._row.get(before) == row:
                del self._row[before]
            self._row[sequence], self._sequence[row] = row, sequence

    def sampled_tokens(self, plan: StepPlan, result: StepResult) -> list[SampledToken]:
        """Returns the row and position of the last token of each sequence in a step. Accepted drafts before it are in the row already."""
        rows = [self._row.get(sequence) for sequence in plan.seq_id]
        sampled = [(entry, row, tokens) for entry, (row, tokens) in enumerate(zip(rows, result.tokens)) if tokens and row is not None]
        return [(row, plan.sampled_position(entry) + len(tokens) - 1, tokens[-1]) for entry, row, tokens in sampled]


@dataclass(frozen=True, slots=True)
class Awaited:
    """The result of a step that another stage completes."""

    runner: RankedRunner
    plan: StepPlan

    def result(self) -> StepResult:
        return self.runner.result(self.plan)


def with_ranks(
    facts: Facts, meeting: Meeting, build: Build, on_lost: OnLost = lambda error: None, verify: bool = False
) -> RankedRunner:
    """Returns a runner of all ranks, which load their parts at the same time. They first communicate during the warm-up.

    `build`: makes the runner of rank 0, and its shadow if steps are verified; every other rank makes its own
    `on_lost`: called in a thread with the reason when a ready rank ends, even between steps
    """
    own = facts.plan_cache(meeting.alike)  # before any process starts, since it may not fit
    ranks = Ranks(facts, own if meeting.alike else None, meeting, on_lost, verify)
    try:
        geometry = own if meeting.alike else ranks.agree(own)
        runner, shadow = build(geometry)
        ranks.wait_until_ready()
    except BaseException as error:
        ranks.stop()
        raise ranks.explained(error) from error
    first = about(0, meeting.cpus_of(0), facts, runner)
    roster = Roster([first, *(ranks.about[peer.rank] for peer in ranks.peers)], facts.config.pipeline_parallel_size)
    roster.log()
    return RankedRunner(runner, geometry, ranks, meeting, roster, shadow)
