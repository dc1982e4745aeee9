"""The hub as a place to ask: where it is, where its cache lies, what a repository holds, and bytes of a file.

The library `huggingface_hub` reads HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, and every
question goes through its session. It is imported where it is used: a model on this disk must load without it.
"""

import contextlib
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from octavo.errors import LoadError
from octavo.loading.hub_files import HubName
from octavo.version import __version__

if TYPE_CHECKING:
    from httpx2 import Response

NEAREST_AMONG = 200
# Commits, digests and names become parts of paths in the cache.
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SAFE = re.compile(r"(?!\.)[^/\\\0]+(/(?!\.)[^/\\\0]+)*")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    size: int
    digest: str  # the hub's: sha256 of a large file, git's own of a small one; blobs in the cache go by it


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    commit: str
    files: dict[str, RemoteFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    endpoint: str
    cache: Path
    timeout: float  # seconds without an answer
    waits: tuple[float, ...] = (1, 2, 4, 8)  # seconds before each new try, until some bytes have come

    @staticmethod
    def from_environment() -> "Hub":
        try:
            from huggingface_hub import constants
        except ImportError:
            raise LoadError("models of the hub need the package huggingface_hub: pip install huggingface_hub") from None
        cache, timeout = Path(constants.HF_HUB_CACHE), float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        return Hub(endpoint=constants.ENDPOINT, cache=cache, timeout=timeout)

    def folder(self, repo: str) -> Path:
        """Where the cache keeps a repository: blobs/, snapshots/ and refs/."""
        from huggingface_hub.file_download import repo_folder_name

        return self.cache / repo_folder_name(repo_id=repo, repo_type="model")

    def listing(self, name: HubName) -> Listing:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, library_name="octavo", library_version=__version__)
        info = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=self.timeout)
        if not _DIGEST.fullmatch(info.sha or ""):
            raise ValueError("a repository without a commit")
        files = {}
        for file in info.siblings or []:
            digest = file.blob_id if file.lfs is None else file.lfs.sha256
            if file.size is not None and _DIGEST.fullmatch(digest or "") and _SAFE.fullmatch(file.rfilename):
                files[file.rfilename] = RemoteFile(file.rfilename, file.size, str(digest))
        return Listing(str(info.sha), files)

    def nearest(self, repo: str) -> str | None:
        """The repository whose name is most like `repo`: of the same owner, else of any. None where the hub cannot say."""
        owner, _, short = repo.partition("/")
        for question in ({"author": owner}, {"search": short}):
            with contextlib.suppress(Exception):  # it is only a hint beside another error
                close = difflib.get_close_matches(repo, self._search(question), n=1)
                if close and close[0] != repo:
                    return close[0]
        return None

    def _search(self, question: dict[str, str]) -> list[str]:
        from huggingface_hub import get_session

        params = {**question, "limit": str(NEAREST_AMONG)}
        answer = get_session().get(f"{self.endpoint}/api/models", params=params, headers=self._headers(), timeout=self.timeout)
        return [model["id"] for model in answer.raise_for_status().json()]

    @contextlib.contextmanager
    def stream(self, repo: str, commit: str, file: str, start: int = 0, end: int | None = None) -> Iterator["Response"]:
        """The bytes of a file from `start` on (up to `end`, where given), as an answer to read from."""
        from huggingface_hub import get_session
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # the library does not mark its exports

        url = f"{self.endpoint}/{repo}/resolve/{commit}/{quote(file)}"
        # Not compressed: the numbers of bytes must be those of the file.
        headers = {**self._headers(), "Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with get_session().stream("GET", url, headers=headers, timeout=self.timeout) as response:
            if response.is_error:
                response.read()  # so that the reason is at hand
            hf_raise_for_status(response)
            yield response

    def _headers(self) -> dict[str, Any]:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # the library does not mark its exports

        return dict(build_hf_headers(library_name="octavo", library_version=__version__))
