"""uvicorn's protocol over httptools, with the limits httptools has not: a head that is long or slow, and errors in our own form.

    head of a request    at most HEAD_BYTES and NUM_HEADERS (431), its URL at most URL_BYTES (414), the whole request in `read_timeout`

A body that is read by a route has that time counted by the guard; here it is counted while nobody reads: before there is a
route, and after it has answered. A refused connection is read, and forgotten, for a moment: closed at once, a client that is still
sending would see a reset connection and no answer.
"""

import asyncio
import json
from asyncio import TimerHandle
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from octavo.server.errors import ApiError, answer_for
from octavo.server.guard import LINGER_SECONDS, new_request_id

HEAD_BYTES = 65536
NUM_HEADERS = 256
URL_BYTES = 8192
_PIECE = 4096  # heads are fed in pieces, so that little of one that is too long is kept


class BoundedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        read_timeout: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._read_timeout = read_timeout
        self._head_bytes = 0
        self._in_head = True
        self._refusal: ApiError | None = None
        self._refused = False
        self._timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None:
            self._start_timer()
        view = memoryview(data)
        while view and not self._refused and not self.transport.is_closing():
            piece = view[:_PIECE] if self._in_head else view
            view = view[len(piece) :]
            if self._in_head:
                self._head_bytes += len(piece)
            super().data_received(bytes(piece))
            if self._in_head and self._head_bytes > HEAD_BYTES:
                self._refuse(ApiError(431, f"the head of the request has more than {HEAD_BYTES:,} bytes"))

    # --- what the parser calls: what is raised in here comes out of feed_data as an error of the parser ----------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._complain(ApiError(414, f"the URL has more than {URL_BYTES:,} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > NUM_HEADERS:
            self._complain(ApiError(431, f"the request has more than {NUM_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request"))

    # -------------------------------------------------------------------------------------------------------------------

    def _complain(self, error: ApiError) -> None:
        self._refusal = error
        raise httptools.HttpParserError(error.message)

    def _refuse(self, error: ApiError) -> None:
        """The connection's last answer; behind others that are not complete, it is cut off without one."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        answer = answer_for(error)
        body = json.dumps(answer.body).encode()
        head = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **answer.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**head, "x-request-id": new_request_id()}.items())
        self.transport.write(STATUS_LINE[answer.status] + lines.encode() + b"\r\n" + body)
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._read_timeout, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            return  # a route reads the body, and the guard counts
        if self._refused or self.transport.is_closing():
            return
        if self._head_bytes:
            self._refuse(ApiError(408, f"the request did not arrive within {self._read_timeout:g} seconds (--read-timeout)"))
        else:
            self.transport.close()
