"""The guard checks every request before its route does, in this order. Each check may refuse the request:

    request id    the client's, if it is short and printable, else a new one; every answer has it
    path, host    must be well-formed, and the host allowed
    origin        web sites that are not allowed are refused; preflight requests of browsers are answered here
    key           Bearer, compared in constant time over its SHA-256 digest, with all keys every time
    body          its content type (none counts as JSON) and declared length first, its length and time while it is read

After an early answer the rest of the body is read for a moment, so that a client that is still sending can read the answer.

A browser on this machine can be made to call a server on 127.0.0.1: by a site whose name suddenly means 127.0.0.1 (the Host header
still has the site's name), or by a script of any site (the Origin header says which). Other programs cannot be used in this way.
"""

import asyncio
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Literal

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import UnavailableError, in_flag
from octavo.log import logger
from octavo.server.errors import ApiError, answer_for
from octavo.server.listen import is_loopback
from octavo.server.records import Caller, arrive, arrive_as
from octavo.server.state import Server
from octavo.server_config import ServerConfig

LINGER_SECONDS = 2.0
RETRY_SECONDS = 5.0  # Retry-After while the server is loading or draining
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
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_ONCE = (b"host", b"authorization", b"content-type", b"content-length", b"origin")
_JSON = re.compile(rb"application/json\s*(;\s*charset\s*=\s*\"?utf-?8\"?\s*)?", re.IGNORECASE)


def new_request_id() -> str:
    return f"req-{secrets.token_hex(16)}"


class Guard:
    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._config = server.config
        self._keys = Keys(server.config)
        self._origins = Origins(server.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "POST":  # other requests are little work, and include /health
            await self._server.starts.enter(1)
        headers = dict(scope["headers"])
        body = IncomingBody(headers, receive, self._config.max_body_bytes, self._config.read_timeout)
        exchange = Exchange(scope, headers, body, send)
        arrive(exchange.request_id.decode(), headers)
        self._server.open_requests += 1
        try:
            self._check(scope, headers, exchange)
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await exchange.answer(204, b"", PREFLIGHT if b"access-control-allow-origin" in dict(exchange.headers) else {})
            else:
                address = scope["client"][0] if scope.get("client") else ""
                arrive_as(self._keys.check(scope["path"], headers, address))
                if self._server.state in ("loading", "draining") and not _is_always_answered(scope["path"]):
                    raise UnavailableError(f"the server is {self._server.state}", RETRY_SECONDS, self._server.state)
                body.check()
                await self._app(scope, body.receive, exchange.send)
        except ClientDisconnect:
            pass
        except Exception as error:
            await exchange.fail(error)
        finally:
            self._server.open_requests -= 1
            self._server.observer.answered(exchange.status)
        if self._config.enable_log_requests:
            exchange.log()

    def _check(self, scope: Scope, headers: dict[bytes, bytes], exchange: "Exchange") -> None:
        names = [name for name, _ in scope["headers"]]
        if twice := next((name for name in _ONCE if names.count(name) > 1), None):
            raise ApiError(400, f"the header {twice.decode()} was sent twice")
        _check_path(scope["path"])
        self._origins.check_host(headers.get(b"host"))
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and self._origins.allows(origin, headers.get(b"host", b"").decode("latin-1")):
            exchange.headers += [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            exchange.headers.append((b"access-control-expose-headers", b"x-request-id, retry-after"))
        elif origin and scope["method"] != "OPTIONS":
            raise ApiError(403, "this origin is not allowed; allow it with --allowed-origins", code="origin_not_allowed")


def _is_always_answered(path: str) -> bool:
    """Returns whether a path is answered even while the server is loading or draining."""
    return is_open(path) or path == "/metrics"


def _check_path(path: str) -> None:
    if "//" in path or not path.isprintable() or "\\" in path or {".", ".."} & set(path.split("/")):
        raise ApiError(404, "there is no such route")


class IncomingBody:
    """The body of a request while it arrives. Its length is limited, and the time until all of it has arrived."""

    def __init__(self, headers: dict[bytes, bytes], receive: Receive, most_bytes: int, seconds: float) -> None:
        self._headers = headers
        self._receive = receive
        self._most_bytes = most_bytes
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._seconds = seconds
        self._num_bytes = 0
        self.unread = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"

    def check(self) -> None:
        """Checks what the headers say about the body, before any of it is read."""
        if not self.unread:
            return
        if self._headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "compressed bodies are not supported; send the body without Content-Encoding")
        # web pages can send a body without a type to other sites, but not without their Origin, which has been checked
        if not _JSON.fullmatch(self._headers.get(b"content-type", b"application/json")):
            raise ApiError(415, "the body must be JSON in UTF-8, with Content-Type: application/json")
        self._count(int(self._headers.get(b"content-length", b"0")))

    async def receive(self) -> Message:
        if not self.unread:
            return await self._receive()  # returns when the client leaves
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._seconds:g} seconds (--read-timeout)") from None
        self.unread = bool(message.get("more_body"))
        self._num_bytes += len(message.get("body", b""))
        self._count(self._num_bytes)
        return message

    async def drain(self) -> None:
        """Reads the rest of the body, for LINGER_SECONDS at most."""
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while self.unread:
                    self.unread = bool((await self._receive()).get("more_body"))
        except TimeoutError:
            pass

    def _count(self, num_bytes: int) -> None:
        if num_bytes > self._most_bytes:
            message = f"the body is larger than {self._most_bytes:,} bytes (--max-body-bytes {in_flag(self._most_bytes)})"
            raise ApiError(413, message, code="body_too_large")


class Exchange:
    """Sends one answer: adds the headers that every answer has, and reads the rest of an unread body before the connection closes."""

    def __init__(self, scope: Scope, headers: dict[bytes, bytes], body: IncomingBody, send: Send) -> None:
        given = headers.get(b"x-request-id", b"")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else new_request_id().encode()
        scope.setdefault("state", {})["request_id"] = self.request_id.decode()
        self.headers: list[tuple[bytes, bytes]] = [(b"x-request-id", self.request_id)]
        self._scope = scope
        self._body = body
        self._send = send
        self.status = 0
        self._closes = False
        self._started = time.perf_counter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._closes = message["status"], self._body.unread
            close = [(b"connection", b"close")] if self._closes else []
            message = {**message, "headers": [*message.get("headers", []), *self.headers, *close]}
        elif self._closes and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            await self._body.drain()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        named = [(name.encode(), value.encode()) for name, value in headers.items()]
        length = [] if status == 204 else [(b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": [*named, *length]})
        await self.send({"type": "http.response.body", "body": body})

    async def fail(self, error: Exception) -> None:
        answer = answer_for(error)
        if self.status:  # the answer has begun: uvicorn ends the connection, so that the client sees that it is not complete
            logger.error("the answer to %s was cut off: %s", self.request_id.decode(), type(error).__name__)
            return
        await self.answer(answer.status, json.dumps(answer.body).encode(), {"content-type": "application/json", **answer.headers})

    def log(self) -> None:
        path = self._scope["path"][:200]
        milliseconds = 1000 * (time.perf_counter() - self._started)
        logger.info("%s %s %d %.1f ms %s", self._scope["method"], ascii(path)[1:-1], self.status, milliseconds, self.request_id.decode())


# -- keys and origins


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
            message = "the API key is not valid" if authorization else f"{needed} is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
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
