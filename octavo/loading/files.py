"""Small readers shared by the loading code: checked JSON, the index of a sharded model, fingerprints and safetensors headers. No torch."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import LoadError
from octavo.text.json_file import read_json_object as read_json_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_BYTES, INDEX_ITEMS = 32 * 2**20, 250_000  # the largest there is has 9 MB and 92,000 weights
MAX_SHARDS = 2048  # ten times as many as the largest models have
FINGERPRINT_WINDOWS, WINDOW_BYTES = 64, 4096

# Files of a model folder. Of each group, one is needed.
PARTS = (("config.json",), (SINGLE, INDEX), ("tokenizer.json", "tokenizer.model"), ("tokenizer_config.json",))


def missing_parts(folder: Path) -> list[str]:
    """Returns the files that a folder lacks to be a model. Whether those that are there can be read is for their readers to say."""
    return [" or ".join(names) for names in PARTS if not any(os.path.lexists(folder / name) for name in names)]


def no_model_folder(folder: Path) -> LoadError:
    """Returns the error that says what a model folder needs, and what this one lacks."""
    *most, last = (" or ".join(names) for names in PARTS)
    missing = missing_parts(folder)
    lack = "has none of these" if len(missing) == len(PARTS) else f"lacks {', '.join(missing)}"
    wanted = f"{', '.join(most)}, and {last}"
    return LoadError(f"{folder} is not a model: a model is a .gguf file, or a folder with {wanted}; this folder {lack}")


def read_weight_map(index: Path) -> dict[str, str]:
    """Returns the file of each weight, from the index of a sharded model."""
    weight_map = read_json_object(index, INDEX_BYTES, INDEX_ITEMS).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise LoadError(f"{index}: weight_map must give a file name for each weight")
    if (shards := len(set(weight_map.values()))) > MAX_SHARDS:
        raise LoadError(f"{index}: names {shards:,} weight files, at most {MAX_SHARDS:,} are allowed")
    return weight_map


def fingerprint(files: list[tuple[Path, int]]) -> bytes:
    """Returns a digest that identifies weights without reading them all: of names, sizes, headers and samples spread over the data.

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


# -- the header of a safetensors file: names, dtypes and shapes, for plans

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    dtype: str  # by the names of the format: F16, I32
    shape: tuple[int, ...]
    start: int  # offset of its bytes after the header
    stop: int


def parse_header(raw: bytes) -> dict[str, Entry]:
    """Returns the tensors that a header lists. Raises ValueError if it is invalid."""
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
    """Returns the tensors of a file, and the offset of their data."""
    try:
        if not path.is_file():
            raise ValueError("not a regular file")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            return parse_header(file.read(size)), 8 + size
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not a valid safetensors file ({error})") from None
