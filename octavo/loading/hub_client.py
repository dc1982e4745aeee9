"""Requests to the hub: its address and cache, the contents of a repository, bytes of a file, and plain error messages.

The library `huggingface_hub` reads HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, and every
request uses its session. It is imported only where it is used: local models must load without it.
"""

import contextlib
import difflib
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from octavo.errors import LoadError
from octavo.loading.names import NAME, HubName, is_default_name
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
    digest: str  # the hub's: sha256 of a large file, git's of a small one; it names the blob in the cache


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: dict[str, RemoteFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    endpoint: str
    cache: Path
    timeout: float  # seconds without a response
    waits: tuple[float, ...] = (1, 2, 4, 8)  # seconds before each retry, until some bytes have arrived

    @staticmethod
    def from_environment() -> "Hub":
        try:
            from huggingface_hub import constants
        except ImportError:
            raise LoadError("models of the hub need the package huggingface_hub: pip install huggingface_hub") from None
        cache, timeout = Path(constants.HF_HUB_CACHE), float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        return Hub(endpoint=constants.ENDPOINT, cache=cache, timeout=timeout)

    def folder(self, repo: str) -> Path:
        """Returns the folder of a repository in the cache, with blobs/, snapshots/ and refs/."""
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
        """Returns the repository with the most similar name, of the same owner or else of any; None if the hub does not respond."""
        owner, _, short = repo.partition("/")
        for question in ({"author": owner}, {"search": short}):
            with contextlib.suppress(Exception):  # it is only a hint in addition to another error
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
        """Yields a response from which the bytes of a file can be read, from `start` on, up to `end` if given."""
        from huggingface_hub import get_session
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # the library does not mark its exports

        url = f"{self.endpoint}/{repo}/resolve/{commit}/{quote(file)}"
                # Not compressed: byte counts must be those of the file.
        headers = {**self._headers(), "Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with get_session().stream("GET", url, headers=headers, timeout=self.timeout) as response:
            if response.is_error:
                response.read()  # makes the reason available
            hf_raise_for_status(response)
            yield response

    def _headers(self) -> dict[str, Any]:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # the library does not mark its exports

        return dict(build_hf_headers(library_name="octavo", library_version=__version__))


# -- errors of the hub, each as one line with advice
#
# A message contains only our own words and numbers, never the text of an exception, which may include a signed address or a token.

LOGIN = "`hf auth login`, or set HF_TOKEN"
RATE_LIMITED = 429
TRANSIENT = (408, RATE_LIMITED, 500, 502, 503, 504)


def status_of(error: Exception) -> int | None:
    """Returns the HTTP status of an error, or None if there was no response."""
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def is_transient(error: Exception) -> bool:
    """Whether to retry: the connection broke, no response arrived in time, or the hub is temporarily unavailable."""
    from httpx2 import TransportError  # the client of `huggingface_hub`

    return isinstance(error, TransportError) or status_of(error) in TRANSIENT


def is_unreachable(error: Exception) -> bool:
    """Whether the hub is unreachable, so that a copy in the cache is used."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    error = _unwrapped(error)
    return isinstance(error, OfflineModeIsEnabled) or is_transient(error)


def _unwrapped(error: Exception) -> Exception:
    """Returns the cause of an error, if the library only reports a missing file."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def explained(error: Exception, name: HubName, hub: Hub) -> LoadError:
    """Returns the error as a message for the user."""
    error = _unwrapped(error)
    host = shown_address(hub.endpoint)
    if is_unreachable(error) and is_default_name(name.repo.partition("/")[2]):
        said = str(_explained(error, name, hub, host))
        return LoadError(f"{said}; {NAME} alone is the default model, which needs no hub")
    return _explained(error, name, hub, host)


def _explained(error: Exception, name: HubName, hub: Hub, host: str) -> LoadError:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return LoadError(f"{name.shown}: not complete in the cache {hub.cache}, and HF_HUB_OFFLINE is set: unset it to download")
    if isinstance(error, errors.GatedRepoError):
        return LoadError(f"{name.repo}: gated: accept its licence at {host}/{name.repo}, then {LOGIN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return LoadError(f"{name.repo}: has no revision {name.revision!r}; {host}/{name.repo}/tree/main lists branches and tags")
    if isinstance(error, errors.RepositoryNotFoundError) or status_of(error) == 404:
        near = hub.nearest(name.repo)
        hint = f"; did you mean {near}?" if near else ""
        return LoadError(f"{name.repo}: not a folder on this machine, and not found on the hub at {host}{hint} (if it is private: {LOGIN})")
    return LoadError(f"{name.shown}: {_trouble(error, host, hub)}")


def _trouble(error: Exception, host: str, hub: Hub) -> str:
    from httpx2 import TimeoutException, TransportError

    status = status_of(error)
    if status in (401, 403):
        return f"{host} refused access ({status}): the token is wrong or may not read this: {LOGIN}"
    if status == RATE_LIMITED:
        return f"{host} accepts no more requests for now (429): wait a few minutes, or {LOGIN}, which raises the limit"
    if status is not None:
        return f"{host} answered with an error ({status}): try again later"
    if isinstance(error, TimeoutException):
        return f"{host} did not answer in {hub.timeout:g} s: try again; HF_HUB_DOWNLOAD_TIMEOUT sets the seconds"
    if isinstance(error, TransportError):
        return f"no connection to {host}, and not complete in the cache {hub.cache}: check the network, proxy settings and HF_ENDPOINT"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {hub.cache} is full: free some space, or set HF_HOME to a folder on another disk"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot use the cache {hub.cache} ({error.strerror}): set HF_HOME to a folder that can be written"
    return f"{host} sent an answer that cannot be read ({type(error).__name__}): check HF_ENDPOINT, or a proxy in between"


def shown_address(address: str) -> str:
    """Returns an address without its user name and password."""
    return re.sub(r"//[^/@]*@", "//", address)
