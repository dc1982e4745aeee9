"""A small HTTP/1.1 client for asyncio: connections that are kept and used again, and bodies handed over as they arrive.

Every piece of a body is stamped in the callback that received it, before anything else is done, so that times are those of
arrival and not of some task that was woken up later.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Callable

from octavo.client.address import Address
from octavo.client.reply import Reply
from octavo.errors import ConfigError, RemoteError

Sink = Callable[[float, Reply, bytes], None]  # when it came (time.perf_counter), what of the answer is known, new bytes of its body


class HttpClient:
    def __init__(self, address: Address, key: str | None) -> None:
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key has characters that no header can have")
        self.address = address
        self._key_line = "" if key is None else f"authorization: Bearer {key}\r\n"
        self._secure = ssl.create_default_context() if address.scheme == "https" else None
        self._idle: list[_Connection] = []

    async def ask(self, method: str, path: str, body: bytes, sink: Sink) -> Reply:
        """One answer, to its end. Cancelled, it leaves the server by closing the connection."""
        data = self._head(method, path, len(body)).encode() + body
        while True:
            connection, used = await self._connection()
            try:
                reply = await connection.ask(data, sink)
            except ConnectionError as error:
                if used and not connection.heard:
                    continue  # the server closed it just now, for it was idle: that says nothing about this request
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
        """One that is idle, or a new one; and whether it was used before."""
        while self._idle:
            if not (connection := self._idle.pop()).closed:
                return connection, True
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self.address.host, self.address.port, ssl=self._secure)
        except OSError as error:
            said = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)
            raise RemoteError(f"no server answers at {self.address} ({said}); is the server running there?") from error
        return connection, False


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.closed = self.heard = False
        self._reply: Reply | None = None
        self._sink: Sink
        self._done: asyncio.Future[Reply]
        self._transport: asyncio.Transport

    async def ask(self, data: bytes, sink: Sink) -> Reply:
        assert self._reply is None
        self.heard, self._reply, self._sink = False, Reply(), sink
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
        if reply is None or self._done.done():  # nothing was asked
            self.close()
            return
        self.heard = True
        try:
            body = reply.feed(data)
            if reply.status:
                self._sink(now, reply, body)
        except Exception as error:  # whoever asked hears of it
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
