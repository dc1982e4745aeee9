"""`PinBook`: the registry of prefixes that must be pinned, for all API processes and across restarts of engines.

    one API process        a list in memory
    several                an unnamed file that all processes have open; a process locks it to read or change it

    bytes of the file      version, length: 8 bytes each | the entries, as msgpack

An engine pins the prefixes of the registry, and loses them when it dies. Times are those of the monotonic clock, which all processes
of a host share. A process that is stopped while it holds the lock must not stop the event loops of the others: each wait for it is
short.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import Struct

from octavo.errors import RequestError, UnavailableError
from octavo.policy.door import prefix_in_use

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


class PinBook:
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
