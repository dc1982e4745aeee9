"""`PinKeeper`: reconciles the pinned prefixes of all engines with the registry, and offers them to the API process.

    pin        adds an entry to the registry; then each engine computes the prefix, and the entry is confirmed when all have it
    check      the first API process compares the registry with what engines report, and has missing prefixes computed

So an engine that was restarted gets its prefixes back, whichever process ordered them. An engine that holds a prefix which is not in
the registry is told to release it.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any

from octavo.engine.pin_book import PinBook, PinEntry
from octavo.engine.replica import RETRY_SECONDS, Replica
from octavo.engine.wire import Unpin
from octavo.errors import OctavoError, RequestError, UnavailableError
from octavo.log import logger
from octavo.messages import PinOrder, PinState
from octavo.outputs import PinnedPrefix

AGAIN_SECONDS = 5.0  # after an engine could not compute a prefix
MOST_LOSSES = 3  # engines in a row that died while they recomputed a prefix: the prefix may be the cause
UNKNOWN = PinState("", False, 0, 0, 0, 0, 0)
Compute = Callable[[PinEntry, PinOrder, Replica], Coroutine[Any, Any, None]]


class PinKeeper:
    def __init__(self, book: PinBook, replicas: Sequence[Replica], compute: Compute, leads: bool) -> None:
        """`replicas`: the list that will hold them. `compute` has an engine compute a prefix. `leads`: this process runs `check`."""
        self._book = book
        self._replicas = replicas
        self._compute = compute
        self._leads = leads
        self._repairs: dict[tuple[int, str], asyncio.Task[None]] = {}  # (engine, pin) -> its repair
        self._not_before: dict[tuple[int, str], float] = {}  # (engine, pin) -> time of the next attempt after a failed repair
        self._losses: Counter[str] = Counter()  # pin -> engines in a row that died while computing it
        self._unwanted: set[str] = set()  # pins that this process gave up while the registry was locked

    async def pin(self, name: str, prompt_token_ids: list[int], cache_salt: str = "", seconds: float | None = None) -> PinnedPrefix:
        """Returns when all ready engines have computed the prefix. If one of them cannot, none keeps it."""
        ends = None if seconds is None else time.monotonic() + seconds
        entry = PinEntry(token_hex(16), name, prompt_token_ids, cache_salt, os.getpid(), ends)
        self._book.add(entry)
        try:
            await self._compute_everywhere(entry)
            if not self._book.confirm(entry.pin_id):
                raise RequestError("the prefix was released, or its ttl ended, before it was computed", "ttl", "prefix_released")
        except BaseException:
            self._forget(entry)
            raise
        return self._told(entry)

    async def _compute_everywhere(self, entry: PinEntry) -> None:
        ready = [replica for replica in self._replicas if replica.is_ready]
        if not ready:
            raise UnavailableError("no engine is ready", RETRY_SECONDS)
        tasks = [asyncio.create_task(self._compute(entry, PinOrder(entry.pin_id, entry.seconds_left), replica)) for replica in ready]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def list(self) -> list[PinnedPrefix]:
        return [self._told(entry) for entry in self._book.entries()]

    def find(self, name: str) -> PinnedPrefix | None:
        entry = self._book.find(name)
        return None if entry is None else self._told(entry)

    def release(self, name: str) -> bool:
        """Releases a prefix without disturbing requests that use it. Returns False if there is no pin with this name."""
        entry = self._book.find(name)
        if entry is not None:
            self._book.remove(entry.pin_id)
            self._unpin_everywhere(entry)
        return entry is not None

    def _forget(self, entry: PinEntry) -> None:
        """Gives up a prefix that could not be computed. If the registry is locked, `check` removes the entry later."""
        self._unwanted.add(entry.pin_id)
        with suppress(UnavailableError):
            self._remove_unwanted()
        self._unpin_everywhere(entry)

    def _remove_unwanted(self) -> None:
        for pin_id in list(self._unwanted):
            self._book.remove(pin_id)
            self._unwanted.remove(pin_id)

    def _unpin_everywhere(self, entry: PinEntry) -> None:
        for replica in self._replicas:
            self._unpin(replica, entry.pin_id)

    def _unpin(self, replica: Replica, pin_id: str) -> None:
        with suppress(UnavailableError):  # then it holds no pins, or `check` releases this one later
            replica.send(Unpin(pin_id))

    def _told(self, entry: PinEntry) -> PinnedPrefix:
        states = [state for replica in self._replicas if (state := self._state(replica, entry.pin_id)) is not None]
        return PinnedPrefix(
            entry.name,
            len(entry.prompt_token_ids),
            max((state.num_tokens for state in states), default=0),
            max((state.num_blocks for state in states), default=0),
            sum(state.hits for state in states),
            sum(state.tokens_saved for state in states),
            entry.seconds_left,
            all((replica.pins or {}).get(entry.pin_id, UNKNOWN).held for replica in self._replicas if replica.is_ready),
        )

    def _state(self, replica: Replica, pin_id: str) -> PinState | None:
        """Returns the state of a pin in an engine, or in the previous engine while this one has not reported any."""
        return (replica.pins or {}).get(pin_id) or replica.pins_before.get(pin_id)

    # --- after restarts ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Reconciles. Called a few times a second."""
        with suppress(UnavailableError):  # the registry is locked: the next call does it
            self._remove_unwanted()
            if self._leads:
                self._reconcile()

    def _reconcile(self) -> None:
        known = [(replica, replica.pins) for replica in self._replicas if replica.is_ready and replica.pins is not None]
        entries = self._book.entries()  # read after the engines' reports, so a reported pin is in it unless it was released
        for entry in [entry for entry in entries if not entry.confirmed and not _is_alive(entry.maker)]:
            self._book.remove(entry.pin_id)
        wanted = {entry.pin_id for entry in entries}
        self._not_before = {key: at for key, at in self._not_before.items() if key[1] in wanted}
        self._losses = Counter({pin_id: losses for pin_id, losses in self._losses.items() if pin_id in wanted})
        for replica, pins in known:
            for pin_id in pins.keys() - wanted:
                self._unpin(replica, pin_id)
            for entry in entries:
                if entry.confirmed and entry.pin_id not in pins:
                    self._repair(replica, entry)

    def _repair(self, replica: Replica, entry: PinEntry) -> None:
        key = replica.number, entry.pin_id
        if key in self._repairs or time.monotonic() < self._not_before.get(key, 0.0):
            return
        self._repairs[key] = asyncio.create_task(self._compute_again(replica, entry))
        self._repairs[key].add_done_callback(lambda task: self._repairs.pop(key))

    async def _compute_again(self, replica: Replica, entry: PinEntry) -> None:
        before = replica.pins_before.get(entry.pin_id)
        counts = (0, 0) if before is None else (before.hits, before.tokens_saved)
        key = replica.number, entry.pin_id
        try:
            await self._compute(entry, PinOrder(entry.pin_id, entry.seconds_left, *counts), replica)
            self._not_before.pop(key, None)
            self._losses.pop(entry.pin_id, None)
        except OctavoError as error:
            logger.warning("Engine %d could not compute a pinned prefix again, and tries it later: %s", replica.number, error)
            self._not_before[key] = time.monotonic() + AGAIN_SECONDS
            if vars(error).get("code") in ("engine_dead", "engine_lost"):
                self._losses[entry.pin_id] += 1
            if self._losses[entry.pin_id] >= MOST_LOSSES:
                logger.error("A pinned prefix is released: %d engines died one after the other while they computed it", MOST_LOSSES)
                self._forget(entry)

    def close(self) -> None:
        for task in list(self._repairs.values()):
            task.cancel()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
