"""`Roster`: the rank registry: properties and activity of each rank, for logs, metrics, the web page and the trace.

    Ready, once, of every rank      ->  facts
    Beat, every second, of each     ->  numbers; and steps, for observers (`on_steps`)

Rank 0 has no separate process: a thread collects its heartbeats. All times are by the clock of this process. A rank is "in a step" from
the moment it has the plan until it has sampled: it computes, or it waits for other ranks. An engine without ranks has an empty
registry.
"""

import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.log import logger
from octavo.messages import BEAT_SECONDS, RankFacts, RankNumbers
from octavo.worker.machine import cpu_list

if TYPE_CHECKING:
    from octavo.worker.rank_process import Beat, Diary, Ready

Step = tuple[int, float, float]  # step number, start and end
LEAST_SECONDS = 0.5  # minimum time between two heartbeats to compute a share: the last one may follow soon after


@dataclass(frozen=True, slots=True)
class _Life:
    """The state of a rank at its last heartbeat. `offset`: our clock minus its own"""

    last_beat: float
    offset: float
    at: float = 0.0  # by its own clock
    steps: int = 0
    seconds: float = 0.0  # in finished steps
    in_steps: float = 0.0  # also in the unfinished one
    share: float = 0.0


class Roster:
    def __init__(self, ranks: "Sequence[Ready]" = (), stages: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.facts = [_facts(about, stages, len(ranks) // stages) for about in ranks]
        self.on_steps: Callable[[int, list[Step]], None] = lambda rank, steps: None
        self._clock = clock
        here = platform.node()
        self._lives = {one.rank: _Life(clock(), 0.0 if one.host == here else float("inf")) for one in self.facts}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def log(self) -> None:
        for one in self.facts:
            logger.info("%s", sentence(one))

    def follow(self, diary: "Diary") -> None:
        """Collects the heartbeats of rank 0 until the registry is closed, and once more at the end."""
        self._thread = threading.Thread(target=self._listen, args=(diary,), name="rank 0", daemon=True)
        self._thread.start()

    def _listen(self, diary: "Diary") -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(BEAT_SECONDS)
            self.hear(0, diary.beat())

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def hear(self, rank: int, beat: "Beat") -> None:
        """Processes a heartbeat. Each rank has one thread that calls this."""
        before, now = self._lives[rank], self._clock()
        offset = min(before.offset, now - beat.at)  # 0, or from the fastest heartbeat of another host
        seconds = before.seconds + sum(ended - began for _, began, ended in beat.steps)
        in_steps = seconds + (0.0 if beat.began is None else beat.at - beat.began)
        passed = beat.at - before.at if before.at else BEAT_SECONDS
        share = before.share if passed < LEAST_SECONDS else min(max((in_steps - before.in_steps) / passed, 0.0), 1.0)
        self._lives[rank] = _Life(now, offset, beat.at, before.steps + len(beat.steps), seconds, in_steps, share)
        if beat.steps:
            self.on_steps(rank, [(step, began + offset, ended + offset) for step, began, ended in beat.steps])

    def numbers(self) -> list[RankNumbers]:
        now = self._clock()
        return [RankNumbers(life.steps, life.in_steps, life.share, max(now - life.last_beat, 0.0)) for life in self._lives.values()]


def _facts(about: "Ready", stages: int, places: int) -> RankFacts:
    stage, place = divmod(about.rank, places)
    return RankFacts(
        rank=about.rank,
        stage=stage,
        stages=stages,
        place=place,
        places=places,
        pid=about.pid,
        host=about.host,
        cores=cpu_list(about.cpus),
        device=about.device,
        kernels=about.kernels,
        first_layer=about.first_layer,
        num_layers=about.num_layers,
        weight_bytes=about.weight_bytes,
    )


def sentence(one: RankFacts) -> str:
    """Returns the properties of a rank, as one line of the log."""
    stage = f"stage {one.stage} of {one.stages}, " if one.stages > 1 else ""
    place = f"place {one.place} of {one.places}, " if one.places > 1 else ""
    layers = f"layers {one.first_layer} to {one.first_layer + one.num_layers - 1}, "
    where = f"process {one.pid} on {one.host}, cores {one.cores}, {one.device} ({one.kernels}), "
    return f"rank {one.rank}: {stage}{place}{where}{layers}{one.weight_bytes / 2**20:,.1f} MiB of weights"
