"""Reads the text files of a model, with limits, because nothing in them is trusted.

A file must be a regular one (a pipe would never end) of at most `MAX_BYTES`, and JSON may not hold more than `MAX_ITEMS`,
since "[],[],[]" takes twenty times its size in memory. Whatever is wrong is a `LoadError` that names the file.
"""

import json
import stat
from pathlib import Path
from typing import Any

from octavo.errors import LoadError

MAX_BYTES = 64 * 2**20  # twice the largest tokenizer.json there is
MAX_ITEMS = 4_000_000  # three times what that one holds


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise LoadError(f"{path}: not UTF-8 (at byte {error.start})") from None


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise LoadError(f"{path}: not a regular file")
        if found.st_size > max_bytes:
            raise LoadError(f"{path}: larger than {max_bytes // 2**20} MiB")
        with path.open("rb") as file:
            return file.read(max_bytes)
    except FileNotFoundError:
        raise LoadError(f"{path}: not found") from None
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror})") from error


def parse_json_object(text: str, path: Path, unique_keys: bool = False, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    """Returns the JSON object in `text`, which came from `path`. With `unique_keys`, no key may occur twice."""
    if sum(map(text.count, ",[{")) > max_items:
        raise LoadError(f"{path}: JSON of more than {max_items:,} items")
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise LoadError(f"{path}: JSON nested too deep") from None
    except ValueError as error:
        raise LoadError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


def read_json_object(path: Path, max_bytes: int = MAX_BYTES, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    return parse_json_object(read_text(path, max_bytes), path, max_items=max_items)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
