"""Opens files that Octavo writes. A file of another kind is never overwritten, and errors name the setting to change."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import ConfigError


def open_own(setting: str, path: str, kind: str, head: bytes, mode: int, go_on: bool = False) -> int:
    """Opens a file for writing and returns its descriptor. `go_on`: append to the file instead of replacing it.

    `head`: the bytes that every file of this `kind` begins with. If the file begins with others, it is an error: a mistyped path
    must not destroy a model.
    """
    try:
        if Path(path).is_file():
            with open(path, "rb") as file:
                if file.read(len(head)) not in (b"", head):
                    raise ConfigError(f"{setting} {path}: there is a file that is no {kind}; choose another name")
        return os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if go_on else os.O_TRUNC), mode)
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}") from error


@contextmanager
def naming_tmpdir() -> Iterator[None]:
    """Turns an OSError about a temporary file into an error that names TMPDIR."""
    try:
        yield
    except OSError as error:
        place = f" in {os.path.dirname(error.filename)}" if error.filename else ""
        raise ConfigError(
            f"no temporary file can be made{place}: {error.strerror or error}; set TMPDIR to a folder that can be written and has room"
        ) from error


def state_dir() -> Path:
    """Returns the folder for small files that are kept between runs, such as the history of a chat."""
    return Path("~/.local/state/octavo").expanduser()
