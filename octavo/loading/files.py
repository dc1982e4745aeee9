"""Small readers shared by the loading code: checked JSON, the index of a sharded model, a cheap fingerprint of a weight file."""

import hashlib
import json
from pathlib import Path
from typing import Any

from octavo.errors import LoadError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FINGERPRINT_WINDOWS, WINDOW_BYTES = 64, 4096


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; a file that is missing, damaged or not an object is a `LoadError` that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path}: not found") from None
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror})") from error
    except RecursionError:
        raise LoadError(f"{path}: JSON nested too deep") from None
    except ValueError as error:  # bad JSON, and text that is not UTF-8
        raise LoadError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


def read_weight_map(index: Path) -> dict[str, str]:
    """Weight name -> file name, out of the index of a sharded model."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise LoadError(f"{index}: weight_map must give a file name for each weight")
    return weight_map


def fingerprint(files: list[tuple[Path, int]]) -> bytes:
    """Tells weights apart without reading them all: of each file the name, size, header and windows spread over the data.

    `files` gives each path with the size of its header.
    """
    digest = hashlib.blake2b(digest_size=32)
    for path, header_bytes in files:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{path.name}\0{size}\0{header_bytes}\0".encode())
            file.seek(0)
            digest.update(file.read(header_bytes))
            for index in range(FINGERPRINT_WINDOWS):
                file.seek(header_bytes + (size - header_bytes) * index // FINGERPRINT_WINDOWS)
                digest.update(file.read(WINDOW_BYTES))
    return digest.digest()
