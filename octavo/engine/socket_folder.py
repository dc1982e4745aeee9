"""The folder of the engine's socket: only its owner may look in, its path is short enough, and it is made again where it was removed.

    TMPDIR/octavo-engine-XXXXXXXX/engine    in /tmp instead, where TMPDIR is too long for the address of a socket
"""

import fcntl
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from octavo.errors import ConfigError
from octavo.own_file import told_with_tmpdir

PREFIX = "octavo-engine-"
NAME = "engine"
MOST_BYTES = (103 if sys.platform == "darwin" else 107) - len(f"/{PREFIX}XXXXXXXX/{NAME}")  # of TMPDIR: a socket's path has a limit
SHORT_PLACE = "/tmp"
YOUNG_SECONDS = 60.0


class SocketFolder:
    """Locked while its owner lives. A folder that is not locked was left behind."""

    def __init__(self) -> None:
        with told_with_tmpdir():
            place = _place()
            _sweep(place)
            self._path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))  # 0700
            self._lock = _locked(self._path)
        self.address = f"ipc://{self._path / NAME}"

    def make_again(self) -> None:
        """Where a cleaner of temporary files removed it. Other processes know its name, so the new one has the same."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self._path), os.fstat(self._lock)):
                return
        self._path.mkdir(0o700, parents=True)  # a folder that somebody else put there is not used
        os.close(self._lock)
        self._lock = _locked(self._path)

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._lock)


def _place() -> str:
    place = tempfile.gettempdir()
    if _fits(place):
        return place
    if not os.access(SHORT_PLACE, os.W_OK):
        raise ConfigError(
            f"TMPDIR is {len(os.fsencode(place))} bytes long, at most {MOST_BYTES} leave room for the path of the engine's socket: "
            f"set it to a shorter folder ({SHORT_PLACE} cannot be written, either)"
        )
    return SHORT_PLACE


def _fits(place: str) -> bool:
    try:
        return len(place.encode()) <= MOST_BYTES
    except UnicodeEncodeError:  # bytes that are no text cannot be told to the other processes
        return False


def _locked(path: Path) -> int:
    """A descriptor that holds the lock."""
    descriptor = os.open(path, os.O_RDONLY)
    with suppress(OSError):  # not every file system can: then it is not swept, either
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _sweep(place: str) -> None:
    """Removes folders whose owner was killed. One so young that it may not be locked yet stays."""
    for path in Path(place).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or somebody else removes it, or it is locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(descriptor).st_mtime > YOUNG_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
