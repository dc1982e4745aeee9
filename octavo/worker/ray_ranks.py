"""Ranks on the nodes of a Ray cluster, as seen by the parent: the counterpart of `worker/host_ranks.py`.

    rank 0     in the engine's own process, on that node
    the rest   one actor each, spread over the nodes (`worker/ray_actor.py`)

Actors belong to the engine's process: Ray kills them when it ends, for any reason. A rank that sends nothing for some seconds may wait
for a CPU or be stopped. The parent asks its node which of them it is.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import msgspec

from octavo.comm.gloo import GlooComm
from octavo.config import EngineConfig, thread_limit
from octavo.errors import OctavoError, RankLost
from octavo.log import Stopwatch, logger
from octavo.worker.host_ranks import END_SECONDS, START_SECONDS, ListeningPeer, OnAnswer, OnEnd, Peer, failed
from octavo.worker.machine import allowed_cpus, keep_to, share_of_cpus
from octavo.worker.places import place_of
from octavo.worker.rank_process import LENGTH_BYTES, RankOrders
from octavo.worker.ray_cluster import RayCluster, reason_of

ASK_SECONDS = 3.0  # without a message, after which the node of a rank is asked whether the rank is stopped
ANSWER_SECONDS = 10.0  # for its answer, which a busy machine may delay; then it is asked again


class RayPeer(ListeningPeer):
    """A rank that is a Ray actor. `ask_whether_stopped`: asks its node, and returns the pending answer"""

    def __init__(
        self,
        ray: Any,
        actor: Any,
        host: str,
        ask_whether_stopped: Callable[[], Any],
        orders: RankOrders,
        on_answer: OnAnswer,
        on_end: OnEnd,
    ) -> None:
        super().__init__(orders, on_answer, on_end)
        self._ray, self._actor, self._host = ray, actor, host
        self._ask_whether_stopped = ask_whether_stopped
        self._gone = "ended"
        self._tell = actor.tell.options(num_returns=0)
        self._hear = actor.hear.options(concurrency_group="answers")
        actor.begin.options(num_returns=0).remote(msgspec.json.encode(orders))
        self._listener.start()

    def tell(self, message: bytes) -> None:
        if self.ended:
            raise self.why()
        self._tell.remote(message)

    def _next(self, limit: float | None) -> bytes | None:
        try:
            pending = self._hear.remote()
            if self._waits_for(pending, limit):
                data: bytes = self._ray.get(pending)
                return data[LENGTH_BYTES:]
        except Exception as error:  # an actor that died, a node that is gone, a disconnected cluster
            self._gone = f"is gone: {reason_of(error)}"
        return None

    def _waits_for(self, pending: Any, limit: float | None) -> bool:
        """Waits until there is a message. Returns False if the rank is stopped, or sends nothing for this many seconds."""
        end = time.monotonic() + (inf if limit is None else limit)
        while not self._ray.wait([pending], timeout=_at_most(ASK_SECONDS, end))[0]:
            if self._is_stopped(pending, end):  # a rank that only waits for a CPU is not
                self._gone = "was stopped"
                return False
            if time.monotonic() > end:
                self._gone = f"did not answer for {self._seconds:g} s"
                return False
        return True

    def _is_stopped(self, pending: Any, end: float) -> bool:
        """Whether the rank's node says that the rank is stopped. A node that has vanished says nothing."""
        answer = self._ask_whether_stopped()
        self._ray.wait([pending, answer], timeout=_at_most(ANSWER_SECONDS, end))
        with suppress(Exception):  # no answer yet, or none at all: then the calls of the rank fail, too
            return bool(self._ray.get(answer, timeout=0))
        return False

    def why(self) -> OctavoError:
        """Returns the reason why it ended: its own message, or else Ray's."""
        name = f"{self.rank} on {self._host}"
        return RankLost(f"rank {name} {self._gone}") if self._failed is None else failed(name, self._failed)

    def stop(self) -> None:
        with suppress(Exception):
            self._actor.end.options(num_returns=0).remote()
        self._listener.join(END_SECONDS)
        with suppress(Exception):
            self._ray.kill(self._actor)


def _at_most(seconds: float, end: float) -> float:
    """Returns these seconds, or fewer if the end comes before."""
    return min(seconds, max(end - time.monotonic(), 0.0))


class RayMeeting:
    """The process group of ranks on several nodes. The thread that creates it is bound to the CPUs of rank 0."""

    alike = False

    def __init__(self, config: EngineConfig) -> None:
        watch, count = Stopwatch(), config.num_ranks
        self._cluster = RayCluster(count, config.device == "cuda")
        self._before = allowed_cpus()
        try:
            found = self._cluster.look()
            self._pids = [0, *(node.pid for node in found)]  # of ranks other than the first
            cpus = [self._before, *(node.cpus for node in found)]
            hosts = self._cluster.hosts
            self._on_host = [hosts.count(host) for host in hosts]  # several nodes of one host share its CPUs
            self._cpus = [share_of_cpus(hosts[:rank].count(hosts[rank]), self._on_host[rank], cpus[rank]) for rank in range(count)]
            self._whole = GlooComm.create(hosts[0], count, START_SECONDS)
            self.place = place_of(self._whole, config, self._on_host[0])
        except BaseException:
            self._cluster.leave()
            raise
        keep_to(self._cpus[0])
        logger.info("Starting %d ranks on Ray took %.2f seconds (%s)", count, watch.total(), ", ".join(hosts))

    def cpus_of(self, rank: int) -> list[int]:
        return self._cpus[rank][: thread_limit()]

    def peer(self, orders: RankOrders, on_answer: OnAnswer, on_end: OnEnd) -> Peer:
        """Starts a rank."""
        rank, cluster = orders.rank, self._cluster
        own = msgspec.structs.replace(
            orders, address=self._whole.address, host=cluster.hosts[rank], on_host=self._on_host[rank]
        )  # fmt: skip
        ask = partial(cluster.ask_whether_stopped, rank, self._pids[rank])
        return RayPeer(cluster.ray, cluster.actors[rank - 1], cluster.hosts[rank], ask, own, on_answer, on_end)

    def give_out(self) -> None:
        """Does nothing: no descriptors were inherited."""

    def wait_at_most(self, seconds: float) -> None:
        self._whole.wait_at_most(seconds)

    def abort(self) -> None:
        """Ends the waiting of this rank."""
        self._whole.abort()

    def leave(self) -> None:
        keep_to(self._before)
        self._cluster.leave()
