"""`--record FILE` writes the lines of the view to a file, which the page can replay without a server (docs/view.md).

Only its owner can read the file. The server decides whether it has text. It ends at MOST_BYTES, with the server, or when the disk is full.
"""

import asyncio
import os
import stat
from contextlib import aclosing, suppress

from octavo.errors import ConfigError, UnavailableError
from octavo.inspector.hub import ViewHub
from octavo.log import logger
from octavo.own_file import open_own

MOST_BYTES = 256 * 2**20
HEAD = b'{"kind":"head"'


class Recorder:
    """Opens its file before a model is loaded, so that a bad path fails at once."""

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._file = open_own("record", path, "recording", HEAD, 0o600)
        if stat.S_ISREG(os.fstat(self._file).st_mode):
            try:
                os.fchmod(self._file, 0o600)  # the file may be an old one
            except OSError as error:
                raise ConfigError(f"record {path}: {error.strerror}") from error
        self._most_bytes = most_bytes
        self._size = 0
        self._task: asyncio.Task[None] | None = None

    def begin(self, hub: ViewHub, with_text: bool) -> None:
        self._task = asyncio.create_task(self._record(hub, with_text))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    async def _record(self, hub: ViewHub, with_text: bool) -> None:
        with suppress(UnavailableError):  # the server ended before the view began
            async with aclosing(hub.lines(with_text)) as lines:
                async for text in lines:
                    if not self._write(text):
                        return

    def _write(self, data: bytes) -> bool:
        """Writes whole lines. Returns whether the recording goes on."""
        if self._size + len(data) > self._most_bytes:
            logger.warning("the recording %s ends here: it has reached %d MiB", self._path, self._most_bytes >> 20)
            return False
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(0, "no space left")
        except OSError as error:
            with suppress(OSError):  # remove half a line
                os.ftruncate(self._file, self._size)
            logger.warning("the recording %s ends here: %s", self._path, error.strerror)
            return False
        self._size += len(data)
        return True
