"""What a model of the hub would need, told from its headers: a few hundred kilobytes instead of its weights.

    config.json and its like     fetched into the cache as for a model
    *.safetensors                8 bytes of length and a JSON header: one or two range reads a file
    *.gguf                       a header of unknown length: range reads, each four times longer, until it parses
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import LoadError
from octavo.loading.files import read_json_object
from octavo.loading.gguf import GGUFFile, read_gguf
from octavo.loading.gguf_config import config_dict
from octavo.loading.hub import CONFIG, Download
from octavo.loading.hub_client import Hub, RemoteFile
from octavo.loading.hub_errors import explained
from octavo.loading.hub_files import HubName, choose_gguf, choose_texts
from octavo.loading.safetensors_header import MAX_BYTES, parse_header

SAFETENSORS_FIRST_BYTES = 2**16
GGUF_FIRST_BYTES, GGUF_MAX_BYTES = 2**21, 2**27

Tensors = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Headers:
    """A model without its weights."""

    config: dict[str, Any]  # for `read_config`: config.json, or what it would say of a GGUF file
    tensors: Tensors  # name in the file -> (dtype or GGUF kind, shape as in torch)
    weight_bytes: int  # of all tensors, as stored
    source: str  # what to call it in errors: owner/name/config.json


def fetch_headers(name: HubName, hub: Hub | None = None) -> Headers:
    """Config, tensor names, kinds and shapes, and the weights' size in bytes, of a model on the hub.

    `parse_hub_name` and `at_revision` make the name. Nothing but JSON, tokenizer and template files comes to rest in the
    cache. Unlike `fetch_model` it always asks the hub; its errors are the same.
    """
    hub = hub or Hub.from_environment()
    try:
        download = Download(hub, name, hub.listing(name))
        gguf = choose_gguf(name, download.listing.files)
        return _folder_headers(download) if gguf is None else _gguf_headers(download, download.listing.files[gguf])
    except LoadError:
        raise
    except Exception as error:  # whatever it is, it ends in one line
        raise explained(error, name, hub) from error


def _folder_headers(download: Download) -> Headers:
    if CONFIG not in download.listing.files:
        raise LoadError(f"{download.name.repo}: has no {CONFIG}")
    download.take(choose_texts(download.listing.files), shown=False)
    tensors: Tensors = {}
    weight_bytes = 0
    for shard in download.weight_files():
        found, size = _safetensors_header(download, download.listing.files[shard])
        tensors |= found
        weight_bytes += size
    return Headers(read_json_object(download.snapshot / CONFIG), tensors, weight_bytes, f"{download.name.repo}/{CONFIG}")


def _safetensors_header(download: Download, file: RemoteFile) -> tuple[Tensors, int]:
    """The tensors of a file and the bytes of their data."""
    data = _read(download, file, 0, min(SAFETENSORS_FIRST_BYTES, file.size))
    end = 8 + int.from_bytes(data[:8], "little")
    if not 8 < end <= min(file.size, MAX_BYTES):
        raise LoadError(f"{download.name.repo}: {file.name} is not a valid safetensors file (a header of {end - 8} bytes)")
    if end > len(data):
        data += _read(download, file, len(data), end)
    try:
        entries = parse_header(data[8:end])
    except ValueError:
        raise LoadError(f"{download.name.repo}: {file.name} is not a valid safetensors file (its header)") from None
    tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    return tensors, sum(entry.stop - entry.start for entry in entries.values())


def _gguf_headers(download: Download, file: RemoteFile) -> Headers:
    source = f"{download.name.repo}/{file.name}"
    with tempfile.TemporaryDirectory() as folder:
        # A file of the right size, so that every offset can be checked, with holes where nothing was fetched.
        path = Path(folder) / "model.gguf"
        with path.open("wb") as target:
            target.truncate(file.size)
        try:
            gguf = _grow(download, file, path)
        except LoadError as error:
            raise LoadError(str(error).replace(str(path), source)) from None
    tensors = {tensor.name: (tensor.kind, tensor.shape) for tensor in gguf.tensors.values()}
    weight_bytes = sum(tensor.num_bytes for tensor in gguf.tensors.values())
    return Headers(config_dict(gguf.metadata, gguf.tensors, source), tensors, weight_bytes, source)


def _grow(download: Download, file: RemoteFile, path: Path) -> GGUFFile:
    have, wanted = 0, GGUF_FIRST_BYTES
    while True:
        end = min(wanted, file.size)
        with path.open("r+b") as target:
            target.seek(have)
            target.write(_read(download, file, have, end))
        have, wanted = end, wanted * 4
        try:
            gguf = read_gguf(path)
            if gguf.header_bytes > have:
                raise LoadError(f"{path}: its header has {gguf.header_bytes:,} bytes or more")  # the end was read from a hole
            return gguf
        except LoadError:
            if have == file.size or wanted > GGUF_MAX_BYTES:
                raise


def _read(download: Download, file: RemoteFile, start: int, end: int) -> bytes:
    with download.hub.stream(download.name.repo, download.listing.commit, file.name, start, end) as response:
        skip = 0 if response.status_code == 206 else start  # a server without ranges begins at the beginning
        data = bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) >= skip + end - start:
                break
    if len(data) < skip + end - start:
        raise LoadError(f"{download.name.repo}: {file.name} ends after {start + len(data) - skip:,} of {file.size:,} bytes; try again")
    return bytes(data[skip : skip + end - start])
