"""`HttpClient` is a small HTTP/1.1 client for asyncio. It keeps connections, and hands a body over as it arrives.

    Address       the URL of a server, taken apart and checked
    Reply         one answer, taken apart as its bytes come in
    HttpClient    the connections to one address

Every piece of a body gets its time in the callback that received it, before anything else is done. So the times are those of
arrival, not those of a task that ran later.
"""

import asyncio
import os
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from octavo.errors import ConfigError, RemoteError

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    scheme: str
    host: str
    port: int
    prefix: str  # comes before every path: "", or "/below" if another server forwards what is below that path

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> Address:
    """Reads http://127.0.0.1:8000, with or without http:// and the /v1 that other clients need."""
    try:
        parts = urlsplit(url if re.match(r"https?:|.*://", url) else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise _wrong(url, str(error)) from error
    if parts.scheme not in PORTS or not parts.hostname:
        raise _wrong(url, "must be like localhost:8000 or http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise _wrong(url, "it may have a host, a port and a path, and nothing else; a key is given with --api-key")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise _wrong(url, "it has characters that no URL has")
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(parts.scheme, parts.hostname, PORTS[parts.scheme] if port is None else port, prefix)


def _wrong(url: str, what: str) -> ConfigError:
    return ConfigError(f"the URL {url!r:.200}: {what}")


# -- an answer, and the lines and events in its body

LONGEST_HEAD = 65_536  # bytes
LONGEST_LINE = 16 * 2**20


class Reply:
    """One HTTP/1.1 answer. Its length or its last chunk says where the body ends. Without either it ends with the connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._held = b""
        self._left: int | None = None  # bytes still to come; None if the length is not known
        self._chunked = False

    @property
    def keeps_alive(self) -> bool:
        return self.done and self.headers.get("connection", "").lower() != "close"

    @property
    def ends_with_connection(self) -> bool:
        return self.status != 0 and not self._chunked and self._left is None

    def feed(self, data: bytes) -> bytes:
        """Takes bytes of the connection. Returns the new bytes of the body among them."""
        self._held += data
        while self.status == 0:
            head, found, rest = self._held.partition(b"\r\n\r\n")
            if not found:
                _check(len(self._held) <= LONGEST_HEAD and (self._held[:5] + b"HTTP/"[len(self._held) :]) == b"HTTP/")
                return b""
            self._held = rest
            self._read_head(head.decode("latin-1"))
        return self._chunks() if self._chunked else self._plain()

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        words = first.split(" ", 2)
        _check(len(words) >= 2 and words[0].startswith("HTTP/1.") and words[1].isdigit())
        if words[1].startswith("1"):  # 100 Continue and the like: the answer comes later
            return
        self.status = int(words[1])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and (length := self.headers.get("content-length")) is not None:
            _check(length.isdigit())
            self._left = int(length)

    def _plain(self) -> bytes:
        body, self._held = self._held, b""
        if self._left is not None:
            body = body[: self._left]
            self._left -= len(body)
            self.done = self._left == 0
        return body

    def _chunks(self) -> bytes:
        held, at, found = self._held, 0, []
        while (end := held.find(b"\r\n", at)) >= 0:
            size = _hex(held[at:end])
            if size == 0:
                self.done = held.find(b"\r\n\r\n", end) >= 0  # trailers are ignored
                break
            start = end + 2
            if len(held) < start + size + 2:
                break
            found.append(held[start : start + size])
            at = start + size + 2
        self._held = held[at:]
        return b"".join(found)


class Lines:
    """Splits a body into lines as its bytes come."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Takes bytes of the body. Returns the lines that they complete."""
        *lines, self._held = (self._held + body).split(b"\n")
        if len(self._held) > LONGEST_LINE:
            raise RemoteError(f"the server sends a line of more than {LONGEST_LINE:,} bytes")
        return lines


class EventLines:
    """Takes the data out of server-sent events. With OpenAI's API the data of an event is always one line."""

    def __init__(self) -> None:
        self._lines = Lines()

    def feed(self, body: bytes) -> list[bytes]:
        return [line[5:].strip() for line in self._lines.feed(body) if line.startswith(b"data:")]


def _hex(text: bytes) -> int:
    digits = text.partition(b";")[0].strip()
    _check(0 < len(digits) <= 8 and all(digit in b"0123456789abcdefABCDEF" for digit in digits))
    return int(digits, 16)


def _check(holds: bool) -> None:
    """Raises an error if the server has broken a rule of HTTP/1.1."""
    if not holds:
        raise RemoteError("what listens there does not speak HTTP/1.1")


# -- connections


Sink = Callable[[float, Reply, bytes], None]  # gets the time (perf_counter), the answer so far, and new bytes of its body


class HttpClient:
    """Asks one server, over as many connections as there are requests at once."""

    def __init__(self, address: Address, key: str | None) -> None:
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key has characters that no header can have")
        self.address = address
        self._key_line = "" if key is None else f"authorization: Bearer {key}\r\n"
        self._secure = ssl.create_default_context() if address.scheme == "https" else None
        self._idle: list[_Connection] = []

    async def send(self, method: str, path: str, body: bytes, sink: Sink) -> Reply:
        """Sends a request and returns its answer when it is complete. If it is cancelled, it closes the connection."""
        data = self._head(method, path, len(body)).encode() + body
        while True:
            connection, used = await self._connection()
            try:
                reply = await connection.send(data, sink)
            except ConnectionError as error:
                if used and not connection.received:
                    continue  # the server closed this idle connection and has not seen the request: try another
                raise RemoteError(f"the server at {self.address} closed the connection before its answer was complete") from error
            if reply.keeps_alive:
                self._idle.append(connection)
            else:
                connection.close()
            return reply

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _head(self, method: str, path: str, length: int) -> str:
        kind = f"content-type: application/json\r\ncontent-length: {length}\r\n" if method == "POST" else ""
        return f"{method} {self.address.prefix}{path} HTTP/1.1\r\nhost: {self.address.authority}\r\n{self._key_line}{kind}\r\n"

    async def _connection(self) -> tuple["_Connection", bool]:
        """Returns an idle connection or a new one, and whether it was used before."""
        while self._idle:
            if not (connection := self._idle.pop()).closed:
                return connection, True
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self.address.host, self.address.port, ssl=self._secure)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)
            raise RemoteError(f"no server answers at {self.address} ({reason}); is the server running there?") from error
        return connection, False


class _Connection(asyncio.Protocol):
    """A connection, which carries one request at a time."""

    def __init__(self) -> None:
        self.closed = self.received = False
        self._reply: Reply | None = None
        self._sink: Sink
        self._done: asyncio.Future[Reply]
        self._transport: asyncio.Transport

    async def send(self, data: bytes, sink: Sink) -> Reply:
        assert self._reply is None
        self.received, self._reply, self._sink = False, Reply(), sink
        self._done = asyncio.get_running_loop().create_future()
        if self.closed:
            raise ConnectionResetError
        self._transport.write(data)
        try:
            return await self._done
        finally:
            if not self._reply.done:
                self.close()
            self._reply = None

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        reply = self._reply
        if reply is None or self._done.done():  # the server sends something unasked
            self.close()
            return
        self.received = True
        try:
            body = reply.feed(data)
            if reply.status:
                self._sink(now, reply, body)
        except Exception as error:  # `send` raises it
            self._done.set_exception(error)
            return
        if reply.done:
            self._done.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._reply is None or self._done.done():
            return
        if error is None and self._reply.ends_with_connection:
            self._reply.done = True
            self._done.set_result(self._reply)
        else:
            self._done.set_exception(ConnectionResetError())
