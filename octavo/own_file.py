"""Files of our own making that a setting names: nothing but one of its kind is ever written over."""

import os
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
