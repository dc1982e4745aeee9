"""Files of our own making: nothing but one of its kind is ever written over, and what goes wrong is told with the setting to change."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import ConfigError


def open_own(setting: str, path: str, kind: str, head: bytes, mode: int, go_on: bool = False) -> int:
    """The descriptor, to write at. `head`: how a `kind` begins; a slip of the hand must not cost a model. `go_on`: behind what is there."""
    try:
        if Path(path).is_file():
            with open(path, "rb") as file:
                if file.read(len(head)) not in (b"", head):
                    raise ConfigError(f"{setting} {path}: there is a file that is no {kind}; choose another name")
        return os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if go_on else os.O_TRUNC), mode)
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}") from error


@contextmanager
def told_with_tmpdir() -> Iterator[None]:
    """For files that nobody named."""
    try:
        yield
    except OSError as error:
        place = f" in {os.path.dirname(error.filename)}" if error.filename else ""
        raise ConfigError(
            f"no temporary file can be made{place}: {error.strerror or error}; set TMPDIR to a folder that can be written and has room"
        ) from error
