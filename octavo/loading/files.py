"""Small readers shared by the loading code: checked JSON, the index of a sharded model, a cheap fingerprint of a weight file."""

import hashlib
from pathlib import Path

from octavo.errors import LoadError
from octavo.text.json_file import read_json_object as read_json_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_BYTES, INDEX_ITEMS = 32 * 2**20, 250_000  # the largest there is has 9 MB and 92,000 weights
MAX_SHARDS = 2048  # ten times as many as the largest models have
FINGERPRINT_WINDOWS, WINDOW_BYTES = 64, 4096


def read_weight_map(index: Path) -> dict[str, str]:
    """Returns the file of each weight, from the index of a sharded model."""
    weight_map = read_json_object(index, INDEX_BYTES, INDEX_ITEMS).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise LoadError(f"{index}: weight_map must give a file name for each weight")
    if (shards := len(set(weight_map.values()))) > MAX_SHARDS:
        raise LoadError(f"{index}: names {shards:,} weight files, at most {MAX_SHARDS:,} are taken")
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
