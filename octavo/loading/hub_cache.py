"""Models in the hub's cache: which of them Octavo can open, their sizes, and how to remove one.

    models--owner--name/blobs/<digest>                 the bytes
                        snapshots/<commit>/<file>      links to them
                        refs/<branch or tag>           a commit

Other programs share the cache. Only files inside it are removed: a link is unlinked, and its target stays.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import LoadError
from octavo.loading.files import INDEX, SINGLE, read_weight_map
from octavo.loading.hub import DEFAULT_BRANCH
from octavo.loading.names import NAME, HubName, choose_gguf, choose_weights, default_model, gguf_labels, parse_hub_name
from octavo.loading.resolve import ModelSource, load_model_config

PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str  # the name to type: owner/name, owner/name@revision, owner/name:Q8_0
    kind: str  # Qwen3 safetensors
    size: int  # bytes
    last_used: float  # seconds since the epoch, as recorded by the file system


@dataclass(frozen=True, slots=True)
class Cached:
    """One repository in the cache."""

    repo: str
    models: list[CachedModel]  # those that Octavo can open
    is_incomplete: bool  # a download of it was interrupted
    size: int  # bytes on disk


def cached_repositories(cache: Path) -> list[Cached]:
    """Returns all repositories of the cache, sorted by name."""
    folders = sorted(cache.glob(f"{PREFIX}*--*")) if cache.is_dir() else []
    named = [(folder, _repo_of(folder)) for folder in folders if folder.is_dir()]
    return [_cached(folder, repo) for folder, repo in named if repo is not None]


def _repo_of(folder: Path) -> str | None:
    name = parse_hub_name(folder.name.removeprefix(PREFIX).replace("--", "/", 1))
    return None if name is None else name.repo


def _cached(folder: Path, repo: str) -> Cached:
    return Cached(repo, list(_models(folder, repo)), any((folder / "blobs").glob("*.incomplete")), size_on_disk(folder))


def _models(folder: Path, repo: str) -> Iterator[CachedModel]:
    refs = folder / "refs"
    commits = {ref.read_text(errors="replace").strip(): ref.relative_to(refs).as_posix() for ref in refs.rglob("*") if ref.is_file()}
    if (refs / DEFAULT_BRANCH).is_file():
        commits[(refs / DEFAULT_BRANCH).read_text(errors="replace").strip()] = DEFAULT_BRANCH
    for snapshot in sorted((folder / "snapshots").glob("*")):
        revision = commits.get(snapshot.name, snapshot.name)
        name = repo if revision == DEFAULT_BRANCH else f"{repo}@{revision}"
        files = files_of(snapshot)
        labels = gguf_labels(files)
        for file, label in labels.items():
            quant = label if list(labels.values()).count(label) == 1 else Path(file).name
            yield from _openable(f"{name}:{quant}", ModelSource(snapshot / file, "gguf", name), [snapshot / file])
        if SINGLE in files or INDEX in files:
            with contextlib.suppress(LoadError):  # weights are missing
                choose_weights(repo, files, read_weight_map(snapshot / INDEX) if INDEX in files else None)
                yield from _openable(name, ModelSource(snapshot, "folder", name), [snapshot / file for file in files if file not in labels])


def files_of(snapshot: Path) -> list[str]:
    """Returns the names of existing files. A broken link does not count."""
    return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())


def _openable(name: str, source: ModelSource, files: list[Path]) -> Iterator[CachedModel]:
    """Yields the model, or nothing if Octavo does not support this kind."""
    with contextlib.suppress(LoadError, OSError):
        family = load_model_config(source).architecture.removesuffix("ForCausalLM")
        form = "GGUF" if source.kind == "gguf" else "safetensors" if source.quantization is None else source.quantization.method.upper()
        found = [file.stat() for file in files]
        yield CachedModel(name, f"{family} {form}", sum(one.st_size for one in found), max(one.st_atime for one in found))


def installed_default() -> CachedModel | None:
    path = default_model()
    return None if path is None else next(_openable(NAME, ModelSource(path, "gguf", NAME), [path]), None)


def size_of(path: Path) -> int:
    """Returns the bytes of a model: of its file, or of all files in its folder. Links are followed."""
    return path.stat().st_size if path.is_file() else sum((path / name).stat().st_size for name in files_of(path))


def size_on_disk(folder: Path) -> int:
    """Returns the bytes of all files below a folder. Links are not followed, so a blob with two names counts once."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed in the meantime
                total += os.lstat(os.path.join(root, name)).st_size
    return total


@dataclass(frozen=True, slots=True)
class Removal:
    """The files that `octavo rm` will remove."""

    folder: Path  # of the repository
    files: list[Path] | None  # None: all of it
    size: int  # bytes on disk

    def execute(self) -> None:
        for path in self.files or ():
            path.unlink(missing_ok=True)
        if self.files is None or not any(path.is_file() for path in self.folder.rglob("*") if path.parent.name != "refs"):
            shutil.rmtree(self.folder)  # it unlinks links and does not follow them
            shutil.rmtree(self.folder.parent / ".locks" / self.folder.name, ignore_errors=True)


def removal(cache: Path, name: HubName) -> Removal:
    """Returns the removal of a whole repository, or of one GGUF file in every revision of it."""
    folder = cache / f"{PREFIX}{name.repo.replace('/', '--')}"
    if folder.is_symlink():
        raise LoadError(f"{folder} is a link to another place: remove it by hand")
    snapshots = [path for path in (folder / "snapshots").glob("*") if path.is_dir() and not path.is_symlink()]
    links = [path for snapshot in snapshots if (path := _gguf_of(name, snapshot)) is not None]
    if not folder.is_dir() or (name.quant is not None and not links):
        raise LoadError(f"{name.shown} is not in the cache {cache}; `octavo list` shows what is")
    if name.quant is None:
        return Removal(folder, None, size_on_disk(folder))
    needed = {_blob_of(path) for snapshot in snapshots for path in snapshot.rglob("*") if path not in links}
    inside = [blob for blob in {_blob_of(path) for path in links} - needed if blob.parent == folder / "blobs"]
    return Removal(folder, [*links, *inside], sum(path.lstat().st_size for path in (*links, *inside)))


def _gguf_of(name: HubName, snapshot: Path) -> Path | None:
    try:
        found = choose_gguf(name, files_of(snapshot))
    except LoadError:  # another revision may have it
        return None
    return None if found is None else snapshot / found


def _blob_of(link: Path) -> Path:
    """Returns the direct target of a link, which may be a link itself."""
    return Path(os.path.normpath(link.parent / os.readlink(link))) if link.is_symlink() else link
