"""Ranks on the nodes of a Ray cluster, as seen by the parent: the counterpart of `worker/host_ranks.py`.

    rank 0     in the engine's own process, on that node
    the rest   one actor each, spread over the nodes (`worker/ray_actor.py`)

Actors belong to the engine's process: Ray kills them when it ends, for any reason.
"""

from contextlib import suppress
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


class RayPeer(ListeningPeer):
    """A rank that is a Ray actor."""

    def __init__(self, ray: Any, actor: Any, host: str, orders: RankOrders, on_answer: OnAnswer, on_end: OnEnd) -> None:
        super().__init__(orders, on_answer, on_end)
        self._ray, self._actor, self._host = ray, actor, host
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
            data: bytes = self._ray.get(self._hear.remote(), timeout=limit)
            return data[LENGTH_BYTES:]
        except self._ray.exceptions.GetTimeoutError:
            self._gone = f"did not answer for {self._seconds:g} s"
        except Exception as error:  # an actor that died, a node that is gone, a disconnected cluster
            self._gone = f"is gone: {reason_of(error)}"
        return None

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


class RayMeeting:
    """The process group of ranks on several nodes. The thread that creates it is bound to the CPUs of rank 0."""

    alike = False

    def __init__(self, config: EngineConfig) -> None:
        watch, count = Stopwatch(), config.num_ranks
        self._cluster = RayCluster(count, config.device == "cuda")
        self._before = allowed_cpus()
        try:
            cpus = [self._before, *(node.cpus for node in self._cluster.look())]
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
        return RayPeer(cluster.ray, cluster.actors[rank - 1], cluster.hosts[rank], own, on_answer, on_end)

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
