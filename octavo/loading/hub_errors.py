"""Errors of the hub, each as one line that says what helps.

Only our own words and numbers go into a message, never the text of an exception: that may hold a signed address or a token.
"""

import errno
import re

from octavo.errors import LoadError
from octavo.loading.default_model import NAME, is_default_name
from octavo.loading.hub_client import Hub
from octavo.loading.hub_files import HubName

LOGIN = "`hf auth login`, or set HF_TOKEN"
RATE_LIMITED = 429
TRANSIENT = (408, RATE_LIMITED, 500, 502, 503, 504)


def status_of(error: Exception) -> int | None:
    """The HTTP status behind an error, where there was an answer at all."""
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def is_transient(error: Exception) -> bool:
    """Whether to try again: the connection broke, no answer came in time, or the hub said "later"."""
    from httpx2 import TransportError  # the library's own client

    return isinstance(error, TransportError) or status_of(error) in TRANSIENT


def is_unreachable(error: Exception) -> bool:
    """Whether the hub could not be reached, so that a copy in the cache is used."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    error = _unwrapped(error)
    return isinstance(error, OfflineModeIsEnabled) or is_transient(error)


def _unwrapped(error: Exception) -> Exception:
    """What happened, where the library only says that a file is not there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def explained(error: Exception, name: HubName, hub: Hub) -> LoadError:
    """The error as a message for the user."""
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
    """Without a name and password in it."""
    return re.sub(r"//[^/@]*@", "//", address)
