"""Models by their names on the hub: finds the files of a model and downloads them into the cache.

    resolve -> fetch_model -> Hub.listing (one request)          hub_client.py
                           -> which files                        names.py
                           -> config.json, checked; disk space
                           -> each file                          download
    The ref of a revision is written last, so a ref always leads to a complete model. Without the hub, the cached copy is used.
    `fetch_headers` reads all but the weights, for plans.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo import log
from octavo.errors import LoadError, OctavoError
from octavo.loading.files import INDEX, MAX_HEADER_BYTES, parse_header, read_json_object, read_weight_map
from octavo.loading.gguf import GGUFFile, read_gguf, read_gguf_model
from octavo.loading.hub_client import Hub, Listing, RemoteFile, explained, is_transient, is_unreachable, shown_address
from octavo.loading.names import HubName, choose_gguf, choose_texts, choose_weights
from octavo.loading.overrides import overridden, read_overridden
from octavo.progress import DownloadProgress, in_units
from octavo.quant.quant_config import read_quant_config

DEFAULT_BRANCH, CONFIG = "main", "config.json"


def fetch_model(name: HubName, weights: bool = True, hub: Hub | None = None, overrides: dict[str, Any] | None = None) -> Path:
    """Returns the model's folder or GGUF file in the cache, and downloads what is missing. Without `weights`, a folder lacks them.

    `overrides`: of its config.json, the setting `hf_overrides`
    """
    hub = hub or Hub.from_environment()
    try:
        return Download(hub, name, hub.listing(name)).model(weights, overrides)
    except OctavoError:
        raise
    except Exception as error:  # whatever it is, it ends in one line
        if is_unreachable(error) and (cached := cached_model(hub, name, weights)) is not None:
            log.logger.warning("%s: %s cannot be reached; using the copy in %s", name.shown, shown_address(hub.endpoint), cached)
            return cached
        raise explained(error, name, hub) from error


@dataclass(frozen=True, slots=True)
class Download:
    """The download of a model: files of one repository, at one commit, into the cache."""

    hub: Hub
    name: HubName
    listing: Listing

    def model(self, weights: bool, overrides: dict[str, Any] | None) -> Path:
        files = self.listing.files
        gguf = choose_gguf(self.name, files) if weights or self.name.quant is not None or CONFIG not in files else None
        if gguf is not None:
            self.take([gguf])
        else:
            if weights:
                self.check_config(overrides)
            self.take([*choose_texts(files), *(self.weight_files() if weights else [])])
        _keep_ref(self.hub.folder(self.name.repo), self.name.revision or DEFAULT_BRANCH, self.listing.commit)
        return self.snapshot / (gguf or "")

    def check_config(self, overrides: dict[str, Any] | None) -> None:
        """Refuses a model that Octavo cannot open before its weights are downloaded."""
        if CONFIG in self.listing.files:
            self.take([CONFIG], shown=False)
            raw, source = read_json_object(self.snapshot / CONFIG), f"{self.name.repo}/{CONFIG}"
            read_overridden(raw, overrides, source)
            read_quant_config(overridden(raw, overrides), source)

    @property
    def snapshot(self) -> Path:
        return self.hub.folder(self.name.repo) / "snapshots" / self.listing.commit

    def weight_files(self) -> list[str]:
        files = self.listing.files
        if INDEX not in files:
            return choose_weights(self.name.repo, files, None)
        self.take([INDEX], shown=False)  # it says what the rest is
        return choose_weights(self.name.repo, files, read_weight_map(self.snapshot / INDEX))

    def take(self, names: list[str], shown: bool = True) -> None:
        """Downloads those of the files that are not in the cache. Weights come last in `names`: if they are complete, everything is."""
        wanted = [self.listing.files[name] for name in names if not (self.snapshot / name).exists()]
        if wanted:
            self.check_disk(wanted)
            with DownloadProgress(self.name.shown, sum(file.size for file in wanted), shown) as progress:
                for file in wanted:
                    download(self.hub, self.name.repo, self.listing.commit, file, progress)

    def check_disk(self, wanted: list[RemoteFile]) -> None:
        folder = self.hub.folder(self.name.repo)
        needed = sum(missing_bytes(folder, file) for file in wanted)
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if needed > (free := shutil.disk_usage(place).free):
            sizes = f"{in_units(needed)} to download, but {in_units(free)} are free on the disk of {self.hub.cache}"
            raise LoadError(f"{self.name.shown}: {sizes}: free some space, or set HF_HOME to a folder on another disk")


def _keep_ref(folder: Path, revision: str, commit: str) -> None:
    """Writes down which commit a branch or tag is, for a later start without the hub."""
    ref = folder / "refs" / revision
    if revision == commit or (ref.is_file() and ref.read_text() == commit):
        return
    with contextlib.suppress(OSError):  # a model in a cache that cannot be written is as good
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = ref.with_name(f"{ref.name}.{os.getpid()}.new")
        fresh.write_text(commit)
        fresh.replace(ref)


def cached_model(hub: Hub, name: HubName, weights: bool = True) -> Path | None:
    """Returns the model in the cache, or None if it is not complete there."""
    folder = hub.folder(name.repo)
    ref = folder / "refs" / (name.revision or DEFAULT_BRANCH)
    snapshot = folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else name.revision or "")
    if snapshot.parent.name != "snapshots" or not snapshot.is_dir():
        return None
    files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    try:
        if not weights and name.quant is None and CONFIG in files:
            return snapshot
        if (gguf := choose_gguf(name, files)) is not None:
            return snapshot / gguf
        choose_weights(name.repo, files, read_weight_map(snapshot / INDEX) if INDEX in files else None)
        return snapshot
    except LoadError:  # what is there does not make up a model
        return None


# -- one file into the cache: resumed after an interruption, checked against its digest, by one process at a time
#
#     blobs/<digest>.incomplete     grows as bytes come, and stays if the download is interrupted
#     blobs/<digest>                the same file once it is complete and its digest is right
#     snapshots/<commit>/<name>     a link to it, made by the hub's own library
#
# The hub's library could do all this, but in every new process it begins a file again from its first byte.


CHUNK_BYTES = 2**20
PARTIAL_CONTENT = 206
SHA256_LETTERS = 64


def missing_bytes(folder: Path, file: RemoteFile) -> int:
    """Returns how many bytes of a file are still to be downloaded."""
    blob = folder / "blobs" / file.digest
    return 0 if blob.exists() else max(0, file.size - _size(_part(blob)))


def download(hub: Hub, repo: str, commit: str, file: RemoteFile, progress: DownloadProgress) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # the library does not mark its exports

    folder = hub.folder(repo)
    if (folder / "snapshots" / commit / file.name).exists():
        return
    blob = folder / "blobs" / file.digest
    lock = hub.cache / ".locks" / folder.name / f"{file.digest}.lock"  # where the library has it, too
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            progress.skip(file.size)
        else:
            _fill(hub, repo, commit, file, _part(blob), progress)
            _check(_part(blob), repo, file)
            _part(blob).replace(blob)
    hf_hub_download(repo, file.name, revision=commit, cache_dir=hub.cache, endpoint=hub.endpoint, etag_timeout=hub.timeout)


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fill(hub: Hub, repo: str, commit: str, file: RemoteFile, part: Path, progress: DownloadProgress) -> None:
    """Appends to `part` until it is complete. After a broken connection it tries again; several failures without a byte are an error."""
    if _size(part) > file.size:
        part.unlink()
    progress.skip(_size(part))
    tries = 0
    while (before := _size(part)) != file.size or not part.exists():
        try:
            _append(hub, repo, commit, file, part, progress)
        except Exception as error:
            tries = 0 if _size(part) > before else tries
            if not is_transient(error) or tries == len(hub.waits):
                raise
            time.sleep(hub.waits[tries])
            tries += 1


def _append(hub: Hub, repo: str, commit: str, file: RemoteFile, part: Path, progress: DownloadProgress) -> None:
    with hub.stream(repo, commit, file.name, start=_size(part)) as response, part.open("ab") as target:
        if response.status_code != PARTIAL_CONTENT:  # the whole file, from its beginning
            progress.skip(-target.tell())
            target.truncate(0)
        for chunk in response.iter_bytes():
            target.write(chunk)
            progress.update(len(chunk))
            if target.tell() > file.size:
                break
        done = target.tell()
    if done != file.size:
        part.unlink()
        raise LoadError(f"{repo}: {file.name} has {file.size:,} bytes, but {done:,} came: the download is damaged; try again")


def _check(part: Path, repo: str, file: RemoteFile) -> None:
    if len(file.digest) == SHA256_LETTERS:
        digest = hashlib.sha256()
    else:  # a file that git keeps itself
        digest = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with part.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.digest:
        part.unlink()
        raise LoadError(f"{repo}: {file.name} was damaged on the way (its digest differs) and is deleted; try again")


# -- headers instead of weights: a few hundred kilobytes say what a model of the hub would need
#
#     config.json and its like     fetched into the cache as for a model
#     *.safetensors                8 bytes of length and a JSON header: one or two range reads a file
#     *.gguf                       a header of unknown length: range reads, each four times longer, until it parses


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
    """Returns the config, the names, kinds and shapes of all tensors, and the bytes of the weights, of a model on the hub.

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
    """Returns the tensors of a file and the bytes of their data."""
    data = _read(download, file, 0, min(SAFETENSORS_FIRST_BYTES, file.size))
    end = 8 + int.from_bytes(data[:8], "little")
    if not 8 < end <= min(file.size, MAX_HEADER_BYTES):
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
    model = read_gguf_model(gguf.metadata, gguf.tensors, source)
    tensors = {tensor.name: (tensor.kind, tensor.shape) for tensor in model.tensors.values()}
    weight_bytes = sum(tensor.num_bytes for tensor in gguf.tensors.values())
    return Headers(model.config, tensors, weight_bytes, source)


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
