"""One rank on a node of a Ray cluster: the actor that its parent calls (`worker/ray_ranks.py`).

Calls and answers are bytes: Ray serialises no object of Octavo. A thread of the actor does the work of a rank process
(`worker/rank_process.py`), with queues in place of its pipes.
"""

import os
import queue
import threading
from collections.abc import Iterator

import msgspec

from octavo.version import __version__


class Node(msgspec.Struct, frozen=True):
    """The properties of a node, as seen by its actor."""

    pid: int  # of the actor
    cpus: list[int]
    version: str  # of Octavo


class RankActor:
    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def look(self) -> bytes:
        """Returns a `Node`."""
        from octavo.worker.machine import allowed_cpus

        return msgspec.json.encode(Node(os.getpid(), allowed_cpus(), __version__))

    def begin(self, orders: bytes) -> None:
        threading.Thread(target=self._serve, args=(orders,), name="rank", daemon=True).start()

    def tell(self, message: bytes) -> None:
        self._orders.put(message)

    def end(self) -> None:
        self._orders.put(None)

    def hear(self) -> bytes:
        """Waits for the next answer of the rank. The last one is empty."""
        return self._answers.get()

    def _serve(self, data: bytes) -> None:
        from octavo import log
        from octavo.comm.gloo import GlooComm
        from octavo.config import allow_threads
        from octavo.worker.machine import keep_to
        from octavo.worker.places import place_of
        from octavo.worker.rank_process import RankOrders, encode, failure, serve

        try:
            orders = msgspec.json.decode(data, type=RankOrders)
            log.setup(orders.log_level, orders.log_format)
            keep_to(orders.cpus)
            allow_threads(len(orders.cpus))
            whole = GlooComm.join(orders.address, orders.host, orders.rank, orders.config.num_ranks, orders.start_seconds)
            place = place_of(whole, orders.config, orders.on_host)
            serve(orders, place, self._bodies(), lambda answer: self._answers.put(encode(answer)))
        except BaseException as error:
            self._answers.put(encode(failure(error)))
        self._answers.put(b"")

    def _bodies(self) -> Iterator[bytes]:
        from octavo.worker.rank_process import LENGTH_BYTES

        while (message := self._orders.get()) is not None:
            yield message[LENGTH_BYTES:]
