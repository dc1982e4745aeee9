"""One file of the hub into its cache, safely: resumed after any interruption, checked against its digest, by one process at a time.

    blobs/<digest>.incomplete     grows as bytes come, and stays where a download is interrupted
    blobs/<digest>                the same file once it is complete and its digest is right
    snapshots/<commit>/<name>     a link to it, made by the hub's own library

The library would do it all, but begins a file again from its first byte in every new process.
"""

import hashlib
import time
from pathlib import Path

from octavo.errors import LoadError
from octavo.loading.hub_client import Hub, RemoteFile
from octavo.loading.hub_errors import is_transient
from octavo.progress import DownloadProgress

CHUNK_BYTES = 2**20
PARTIAL_CONTENT = 206
SHA256_LETTERS = 64


def missing_bytes(folder: Path, file: RemoteFile) -> int:
    """What is still to come of a file."""
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
    """Append to `part` until it is complete. A broken connection is taken up again; several in a row without a byte are an error."""
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
