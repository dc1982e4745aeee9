"""The header of a safetensors file, for plans: names, kinds and shapes, read without torch and without mapping the file."""

import json
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import LoadError

MAX_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    dtype: str  # in the format's words: F16, I32
    shape: tuple[int, ...]
    start: int  # of its bytes, behind the header
    stop: int


def parse_header(raw: bytes) -> dict[str, Entry]:
    """Raises ValueError if this is not a valid header."""
    try:
        header = json.loads(raw)
        return {name: _entry(**entry) for name, entry in header.items() if name != "__metadata__"}
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("not a header") from error


def _entry(dtype: str, shape: list[int], data_offsets: list[int]) -> Entry:
    start, stop = data_offsets
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError("not an entry")
    return Entry(dtype, tuple(shape), start, stop)


def read_header(path: Path) -> tuple[dict[str, Entry], int]:
    """Returns the tensors of a file, and the byte at which their data begin."""
    try:
        if not path.is_file():
            raise ValueError("not a regular file")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= MAX_BYTES:
                raise ValueError(f"a header of {size} bytes")
            return parse_header(file.read(size)), 8 + size
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not a valid safetensors file ({error})") from None
