"""Who sends a request, and whether they may use the server.

    Arrival    when a request arrived, its id and its caller: set by the guard, read by records, spans and log lines
    Keys       bearer keys, compared in constant time over their SHA-256 digests, all of them every time
    Origins    which host names clients may use for the server, and which web sites may call it
    Holder     which key a request has; it says who may read the text of other people's prompts and answers

A browser on this machine can be made to call a server on 127.0.0.1: by a site whose name suddenly means 127.0.0.1 (the Host header
still has the site's name), or by a script of any site (the Origin header says which). Other programs cannot be used in this way.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal

from octavo import log
from octavo.server.errors import ApiError
from octavo.server.listen import is_loopback
from octavo.server_config import ServerConfig

OPEN = frozenset({"/health", "/"})  # answered without a key, like the files of the page
# Answered only with the admin key. Without --admin-key these routes do not exist, and the error says so.
ADMIN = frozenset({"/reset_prefix_cache", "/admin/restart"})
PREFIXES = "/v1/prefixes"  # and what is below it: where there are keys, answered only with the admin key
PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
    "access-control-allow-headers": "authorization, content-type, x-request-id",
    "access-control-max-age": "600",
}
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_HEADERS = (b"traceparent", b"tracestate")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. Its name is its key if the server has several keys, else its address."""

    name: str = ""
    reads_text: bool = False  # whether it may read everybody's text

    def may_read(self, other: "Caller") -> bool:
        """Returns whether it may see what `other` sent."""
        return self.reads_text or self.name == other.name


@dataclass(frozen=True, slots=True)
class Arrival:
    request_id: str = ""  # as in x-request-id; a client may have chosen it
    at: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # W3C trace context
    caller: Caller = field(default_factory=Caller)


_current: ContextVar[Arrival] = ContextVar("arrival")


def arrive(request_id: str, headers: Mapping[bytes, bytes]) -> None:
    """Notes the arrival of a request, for this task and those it starts."""
    found = {name.decode(): headers[name].decode("latin-1") for name in _HEADERS if name in headers}
    _current.set(Arrival(request_id, trace_headers=found))
    log.request_id.set(request_id)


def arrive_as(caller: Caller) -> None:
    """Notes who sent the request, once its key has been checked."""
    _current.set(replace(current_arrival(), caller=caller))


def current_arrival() -> Arrival:
    """Returns the arrival of the request that this task works on; outside of a request, one that arrives now."""
    return _current.get(None) or Arrival()


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith("/web/")


class Keys:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._users = [_digest(key.encode()) for key in dict.fromkeys(config.api_key)]
        self._admins = [] if config.admin_key is None else [_digest(config.admin_key.encode())]

    def check(self, path: str, headers: Mapping[bytes, bytes], address: str = "") -> Caller:
        """Returns who sends a request with these headers (names in lower case). Raises ApiError if its key may not use this path."""
        if is_open(path):
            return Caller(address)
        authorization = headers.get(b"authorization")
        token = _digest(_bearer(authorization))
        user, admin = _among(token, self._users), _among(token, self._admins)
        for_admins = self._is_for_admins(path)
        if for_admins and not admin and (user or not (self._users or self._admins)):
            instead = "" if self._admins else ", and the server has none: start it with --admin-key KEY"
            raise ApiError(403, f"this route needs the admin key{instead}", code="admin_key_required")
        if not admin and (for_admins or (self._users and not user)):
            needed = "the admin key" if for_admins else "an API key"
            said = "the API key is not valid" if authorization else f"{needed} is needed: Authorization: Bearer KEY"
            raise ApiError(401, said, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        holder: Holder = "admin" if admin else "user" if user else "nobody"
        name = token.hex() if holder == "user" and len(self._users) > 1 else address
        return Caller(name, may_read_text(self._config, holder, host_name(headers.get(b"host")), headers))

    def _is_for_admins(self, path: str) -> bool:
        has_keys = bool(self._users or self._admins)
        return path in ADMIN or (has_keys and (path == PREFIXES or path.startswith(f"{PREFIXES}/")))


def _bearer(authorization: bytes | None) -> bytes:
    scheme, _, token = (authorization or b"").partition(b" ")
    return token if scheme.lower() == b"bearer" else b""


def _among(token: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for one in known:
        found |= secrets.compare_digest(token, one)
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Origins:
    def __init__(self, config: ServerConfig) -> None:
        self._hosts = {name.lower().strip("[]") for name in (config.host, *config.allowed_hosts)}
        self._checks_hosts = bool(config.allowed_hosts) or (is_loopback(config.host) and not config.api_key)
        self._origins = frozenset(config.allowed_origins)

    def check_host(self, host: bytes | None) -> None:
        """Raises ApiError if clients may not call the server by this name. None: there was no Host header, which HTTP/1.0 allows."""
        name = host_name(host)
        if host is not None and not name:
            raise ApiError(400, "the Host header must be a name or an address, with or without a port")
        if self._checks_hosts and name not in self._hosts and not is_loopback(name):
            raise ApiError(403, f"the host name {name!r} is not allowed; allow it with --allowed-hosts", code="host_not_allowed")

    def allows(self, origin: str, host: str) -> bool:
        """Returns whether web pages of this origin may call: those allowed by the settings, and our own."""
        return "*" in self._origins or origin in self._origins or (bool(host) and origin.partition("://")[2] == host)


def host_name(host: bytes | None) -> str:
    """Returns the name or address in a Host header, without its port; "" if there is none."""
    found = _HOST.fullmatch((host or b"").decode("latin-1"))
    return found[1].lower().strip("[]") if found else ""


# -- who may read the text of other people's prompts and answers: in the view, in records and in recordings
#
#   one key set          every client with the key
#   several keys set     every client with the admin key
#   no key set           every client on this machine: the server listens on loopback, and no proxy forwarded the request
#
# All other clients see blocks without text. If other machines can reach a server without a key, only the admin key shows text.

Holder = Literal["nobody", "user", "admin"]  # which valid key a request has

# Headers that proxies, tunnels and content delivery networks add to a request that they forward.
_FORWARDING = frozenset(
    {
        b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"x-original-forwarded-for", b"x-original-host",
        b"true-client-ip", b"fastly-client-ip", b"fly-client-ip", b"client-ip", b"cdn-loop", b"x-amzn-trace-id", b"x-azure-clientip",
        b"x-appengine-user-ip", b"x-proxyuser-ip",
    }
)  # fmt: skip
_FORWARDING_PREFIXES = (b"x-forwarded", b"cf-", b"x-envoy-", b"tailscale-")


def may_read_text(config: ServerConfig, holder: Holder, host: str, header_names: Iterable[bytes]) -> bool:
    """Returns whether a request may read everybody's text. `host`: the name in its Host header. `header_names`: in lower case."""
    if holder == "admin":
        return True
    if config.api_key:
        return holder == "user" and len(set(config.api_key)) == 1
    return is_loopback(config.host) and is_loopback(host) and not any(map(_is_forwarding, header_names))


def _is_forwarding(name: bytes) -> bool:
    return name in _FORWARDING or name.startswith(_FORWARDING_PREFIXES)


def recording_has_text(config: ServerConfig) -> bool:
    """Returns whether `--record` writes text: only if some client may read it."""
    return is_loopback(config.host) or bool(config.api_key) or config.admin_key is not None


def who_reads(config: ServerConfig) -> str | None:
    """Returns what an operator should know about a server that other machines can reach; None on loopback."""
    if is_loopback(config.host):
        return None
    if not config.api_key:
        used = f"NO API KEY: everyone who can reach {config.host} can use this server"
        seen = f" and watch its blocks. {_readers(config)}" if config.inspector else "."
        return f"{used}{seen}{_recorded(config)} Set --api-key or OCTAVO_API_KEY, or leave out --host."
    return f"Everyone with a key can use this server. {_readers(config)}{_recorded(config)}" if config.inspector else None


def _readers(config: ServerConfig) -> str:
    if len(set(config.api_key)) == 1:
        return "Everyone with the key can read all prompts and answers at /v1/view; --no-inspector removes it."
    who = "Nobody" if config.admin_key is None else "Only the admin key"
    return f"{who} can read the prompts and answers of others."


def _recorded(config: ServerConfig) -> str:
    if config.record is None:
        return ""
    return f" The recording {config.record} has {'their text' if recording_has_text(config) else 'no text'}."
