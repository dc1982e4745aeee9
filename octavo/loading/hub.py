"""Models by their names on the hub: finds the files of a model and downloads them into the cache.

    resolve -> fetch_model -> Hub.listing (one request)          hub_client
                           -> which files                        hub_files
                           -> config.json, checked; disk space
                           -> each file                          hub_download
    The ref of a revision is written last, so a ref always leads to a complete model. Without the hub, the cached copy is used.
"""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from octavo import log
from octavo.errors import LoadError
from octavo.loading.files import INDEX, read_json_object, read_weight_map
from octavo.loading.hub_client import Hub, Listing, RemoteFile
from octavo.loading.hub_download import download, missing_bytes
from octavo.loading.hub_errors import explained, is_unreachable, shown_address
from octavo.loading.hub_files import HubName, choose_gguf, choose_texts, choose_weights
from octavo.models.registry import read_config
from octavo.progress import DownloadProgress, in_units
from octavo.quant.quant_config import read_quant_config

DEFAULT_BRANCH, CONFIG = "main", "config.json"


def fetch_model(name: HubName, weights: bool = True, hub: Hub | None = None) -> Path:
    """The model's folder or GGUF file in the cache, downloaded as far as it is not there. Without `weights`, only the rest of a folder."""
    hub = hub or Hub.from_environment()
    try:
        return Download(hub, name, hub.listing(name)).model(weights)
    except LoadError:
        raise
    except Exception as error:  # whatever it is, it ends in one line
        if is_unreachable(error) and (cached := cached_model(hub, name, weights)) is not None:
            log.logger.warning("%s: %s cannot be reached; using the copy in %s", name.shown, shown_address(hub.endpoint), cached)
            return cached
        raise explained(error, name, hub) from error


@dataclass(frozen=True, slots=True)
class Download:
    """A model on its way: the files of one repository, at one commit, into the cache."""

    hub: Hub
    name: HubName
    listing: Listing

    def model(self, weights: bool) -> Path:
        files = self.listing.files
        gguf = choose_gguf(self.name, files) if weights or self.name.quant is not None or CONFIG not in files else None
        if gguf is not None:
            self.take([gguf])
        else:
            if weights:
                self.check_config()
            self.take([*choose_texts(files), *(self.weight_files() if weights else [])])
        _keep_ref(self.hub.folder(self.name.repo), self.name.revision or DEFAULT_BRANCH, self.listing.commit)
        return self.snapshot / (gguf or "")

    def check_config(self) -> None:
        """A model that Octavo cannot open is refused before its weights are downloaded."""
        if CONFIG in self.listing.files:
            self.take([CONFIG], shown=False)
            raw = read_json_object(self.snapshot / CONFIG)
            read_config(raw, f"{self.name.repo}/{CONFIG}")
            read_quant_config(raw, f"{self.name.repo}/{CONFIG}")

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
        """Have these files in the cache. Weights come last in `names`: where they are complete, all is."""
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
    """Which commit a branch or tag was, for whoever asks without the hub."""
    ref = folder / "refs" / revision
    if revision == commit or (ref.is_file() and ref.read_text() == commit):
        return
    with contextlib.suppress(OSError):  # a model in a cache that cannot be written is as good
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = ref.with_name(f"{ref.name}.{os.getpid()}.new")
        fresh.write_text(commit)
        fresh.replace(ref)


def cached_model(hub: Hub, name: HubName, weights: bool = True) -> Path | None:
    """The model in the cache, if it is complete there."""
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
