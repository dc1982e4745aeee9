"""Pinned prefixes of all engines, as API processes see them.

    PinRegistry      the prefixes that must be pinned, for all API processes and across restarts of engines
    PinReconciler    has engines compute and release prefixes, and compares what they report with the registry

With one API process the registry is a list in memory. Several processes have an unnamed file open, and a process locks it to read or
change it: version, length (8 bytes each), then the entries as msgpack. A process that is stopped while it holds the lock must not stop
the event loops of the others, so each wait for it is short. Times are those of the monotonic clock, which all processes share.

An engine pins the prefixes of the registry, and loses them when it dies. The first API process then has missing prefixes computed
again, whichever process ordered them. An engine that holds a prefix which is not in the registry is told to release it.
"""

import asyncio
import fcntl
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Any

import msgspec
from msgspec import Struct

from octavo.engine.replica import RETRY_SECONDS, Replica
from octavo.engine.wire import Unpin
from octavo.errors import OctavoError, RequestError, UnavailableError
from octavo.log import logger
from octavo.messages import PinOrder, PinState
from octavo.outputs import PinnedPrefix
from octavo.policy.request import prefix_in_use

MOST_PINS = 256
LOCK_SECONDS = 0.1  # the longest wait for the lock: its holder keeps it for a few milliseconds, unless it was stopped
TRY_SECONDS = 0.001  # between two tries
_HEAD = struct.Struct("<QQ")


class PinEntry(Struct, array_like=True, frozen=True):
    pin_id: str
    name: str
    prompt_token_ids: list[int]
    cache_salt: str
    maker: int  # id of the process that has the prefix computed
    ends: float | None  # None: until it is released
    confirmed: bool = False  # whether all engines that were ready have it

    @property
    def seconds_left(self) -> float | None:
        return None if self.ends is None else max(0.0, self.ends - time.monotonic())


class PinRegistry:
    """If another process keeps the registry locked, all methods raise UnavailableError and change nothing."""

    def __init__(self, shared: int | None = None) -> None:
        """`shared`: the descriptor of a file that other processes have open, too. A new file is empty."""
        self._shared = shared
        self._version = 0
        self._entries: list[PinEntry] = []
        self._is_held = False  # another process had the lock for too long: only one try, until that succeeds

    def entries(self) -> list[PinEntry]:
        """Returns all entries that have not expired, oldest first."""
        with self._locked(fcntl.LOCK_SH):
            return self._live()

    def find(self, name: str) -> PinEntry | None:
        return next((entry for entry in self.entries() if entry.name == name), None)

    def add(self, entry: PinEntry) -> None:
        with self._locked(fcntl.LOCK_EX):
            live = self._live()
            if any(other.name == entry.name for other in live):
                raise prefix_in_use(entry.name)
            if len(live) >= MOST_PINS:
                raise RequestError(f"{len(live)} prefixes are pinned, which is the maximum; release one first", "name", "too_many_prefixes")
            self._write([*live, entry])

    def confirm(self, pin_id: str) -> bool:
        """Records that all engines have it. Returns False if it was released or has expired meanwhile."""
        with self._locked(fcntl.LOCK_EX):
            live = self._live()
            self._write([msgspec.structs.replace(entry, confirmed=True) if entry.pin_id == pin_id else entry for entry in live])
            return any(entry.pin_id == pin_id for entry in live)

    def remove(self, pin_id: str) -> None:
        with self._locked(fcntl.LOCK_EX):
            self._write([entry for entry in self._live() if entry.pin_id != pin_id])

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Returns a context in which no other process changes the registry and its entries are current."""
        if self._shared is None:
            yield
            return
        self._lock(self._shared, kind)
        try:
            self._read(self._shared)
            yield
        finally:
            fcntl.lockf(self._shared, fcntl.LOCK_UN)

    def _lock(self, shared: int, kind: int) -> None:
        deadline = time.monotonic() + (0.0 if self._is_held else LOCK_SECONDS)
        while True:
            try:
                fcntl.lockf(shared, kind | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # systems differ
                self._is_held = time.monotonic() >= deadline
                if self._is_held:
                    text = "another API process keeps the list of pinned prefixes locked; try again later"
                    raise UnavailableError(text, retry_after=1, code="prefixes_locked") from None
                time.sleep(TRY_SECONDS)
            else:
                self._is_held = False
                return

    def _live(self) -> list[PinEntry]:
        now = time.monotonic()
        return [entry for entry in self._entries if entry.ends is None or entry.ends > now]

    def _read(self, shared: int) -> None:
        head = os.pread(shared, _HEAD.size, 0)
        version, length = _HEAD.unpack(head) if head else (0, 0)
        if version != self._version:
            self._version = version
            self._entries = msgspec.msgpack.decode(os.pread(shared, length, _HEAD.size), type=list[PinEntry])

    def _write(self, entries: list[PinEntry]) -> None:
        self._entries = entries
        self._version += 1
        if self._shared is not None:
            data = msgspec.msgpack.encode(entries)
            data = _HEAD.pack(self._version, len(data)) + data
            if os.pwrite(self._shared, data, 0) < len(data):
                raise OSError(f"the list of pinned prefixes, {len(data)} bytes, could not be written: the disk is full")


# -- the reconciler

AGAIN_SECONDS = 5.0  # after an engine could not compute a prefix
MOST_LOSSES = 3  # engines in a row that died while they recomputed a prefix: the prefix may be the cause
UNKNOWN = PinState("", False, 0, 0, 0, 0, 0)
Compute = Callable[[PinEntry, PinOrder, Replica], Coroutine[Any, Any, None]]


class PinReconciler:
    """Pins and releases prefixes for the API process, and reconciles what engines hold with the registry."""

    def __init__(self, registry: PinRegistry, replicas: Sequence[Replica], compute: Compute, leads: bool) -> None:
        """`replicas`: the list that will hold them. `compute` has an engine compute a prefix. `leads`: this process runs `check`."""
        self._registry = registry
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
        self._registry.add(entry)
        try:
            await self._compute_everywhere(entry)
            if not self._registry.confirm(entry.pin_id):
                raise RequestError("the prefix was released, or its ttl ended, before it was computed", "ttl", "prefix_released")
        except BaseException:
            self._forget(entry)
            raise
        return self._described(entry)

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
        return [self._described(entry) for entry in self._registry.entries()]

    def find(self, name: str) -> PinnedPrefix | None:
        entry = self._registry.find(name)
        return None if entry is None else self._described(entry)

    def release(self, name: str) -> bool:
        """Releases a prefix without disturbing requests that use it. Returns False if there is no pin with this name."""
        entry = self._registry.find(name)
        if entry is not None:
            self._registry.remove(entry.pin_id)
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
            self._registry.remove(pin_id)
            self._unwanted.remove(pin_id)

    def _unpin_everywhere(self, entry: PinEntry) -> None:
        for replica in self._replicas:
            self._unpin(replica, entry.pin_id)

    def _unpin(self, replica: Replica, pin_id: str) -> None:
        with suppress(UnavailableError):  # then it holds no pins, or `check` releases this one later
            replica.send(Unpin(pin_id))

    def _described(self, entry: PinEntry) -> PinnedPrefix:
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
        entries = self._registry.entries()  # read after the engines' reports, so a reported pin is in it unless it was released
        for entry in [entry for entry in entries if not entry.confirmed and not _is_alive(entry.maker)]:
            self._registry.remove(entry.pin_id)
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
