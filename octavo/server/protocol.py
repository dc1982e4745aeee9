"""uvicorn's HTTP protocol over httptools, with limits that uvicorn does not have, and with errors in our own form.

    head         at most HEAD_BYTES and NUM_HEADERS (431), its URL at most URL_BYTES (414); the whole request arrives in `read_timeout`
    Upgrade      is ignored: this server speaks HTTP/1.1, and the body belongs to the request
    body         has a Content-Length, or is chunked; other transfer encodings are refused
    not HTTP     gets a 400, after the answers to the requests before it
    half-closed  a client that has stopped sending still gets its answer; if it has left, its request ends (`_probe_client`)
    answer       its client reads LEAST_BYTES of it in each `write_timeout`, or all there is; otherwise the connection is reset

While a route reads a body, the guard limits the time. This module limits it while no route reads: before there is one, and after it has
answered. A refused connection is read for LINGER_SECONDS before it is closed. If it were closed at once, a client that is still sending
would see a reset connection and no answer.
"""

import asyncio
import json
import math
import socket
import struct
from asyncio import TimerHandle
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.server.errors import ApiError, answer_for
from octavo.server.guard import LINGER_SECONDS, new_request_id

HEAD_BYTES = 65536
NUM_HEADERS = 256
URL_BYTES = 8192
LEAST_BYTES = 65536
SILENT_SECONDS = 1.0
_PIECE = 4096  # a head goes to the parser in pieces, so that the parser never holds much of one that is too long
_PROBE_SECONDS = 0.005, 0.1  # the first and the longest pause between two probes of a half-closed connection
_TCP_CLOSED = 7  # TCP_CLOSE in Linux
_INFO_BYTES = 128  # of struct tcp_info, up to the count of acknowledged bytes; some kernels return fewer


class BoundedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        read_timeout: float,
        write_timeout: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._read_timeout = read_timeout
        self._write_timeout = write_timeout
        self._head_bytes = 0
        self._in_head = True
        self._in_request = False  # a part of a request has arrived, and not all of it
        self._running: RequestResponseCycle | None = None  # the request that is being answered; uvicorn's `cycle` is the newest one
        self._unparsed = bytearray()  # bytes that arrived while a request waited for the one before it
        self._sends_no_more = False
        self._complaint: ApiError | None = None  # why a callback of the parser raised: the answer to give
        self._refusal: ApiError | None = None  # the last answer of this connection; it waits for the answers before it
        self._refused = False  # no more bytes are parsed
        self._read_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._look_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._read_timer, self._write_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        self.pipeline.clear()
        if self._running is not None:  # uvicorn ends only the newest request
            _leave(self._running)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.pipeline:
            self._unparsed += data
            if len(self._unparsed) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            return
        if self._read_timer is None:
            self._start_read_timer()
        view = memoryview(data)
        while view and not self._refused and not self.transport.is_closing():
            piece = view[:_PIECE] if self._in_head else view
            view = view[len(piece) :]
            if self._in_head:
                self._head_bytes += len(piece)
            self._feed(piece)
            if self._in_head and self._head_bytes > HEAD_BYTES:
                self._refuse(ApiError(431, f"the request line and headers have more than {HEAD_BYTES:,} bytes"))

    def _feed(self, data: memoryview) -> None:
        while data and not self._refused:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._feed_again()
            except httptools.HttpParserError as error:
                self._refuse(self._complaint or ApiError(400, f"this is not a valid HTTP request: {error}"))
                return

    def _feed_again(self) -> None:
        """Gives the head to a new parser, without its Upgrade header: the old parser takes the body for another protocol."""
        first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._feed(memoryview(b"".join([first, *lines, b"\r\n"])))

    # --- callbacks of the parser: what they raise, feed_data raises as an error of the parser --------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_request = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._complain(ApiError(414, f"the URL has more than {URL_BYTES:,} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > NUM_HEADERS:
            self._complain(ApiError(431, f"the request has more than {NUM_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._complain(ApiError(405, "CONNECT is not supported: this server is not a proxy"))
        codings = b", ".join([value for name, value in self.headers if name == b"transfer-encoding"]).decode("latin-1")
        if codings.lower() not in ("", "chunked"):
            self._complain(ApiError(400, f"Transfer-Encoding is {codings[:80]!a}, only chunked is supported"))
        if self.parser.should_upgrade():
            return  # see _feed_again
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()
        self.flow.resume_reading()  # uvicorn stops reading while a request waits, and would not see its client leave

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._in_request = True, False
        self._stop_read_timer()
        super().on_message_complete()

    # --- the end of a connection -----------------------------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open, for answers that are still to be sent."""
        self._sends_no_more = True
        self._stop_read_timer()
        self._check_end()
        return self._refused or (self._is_busy and self._probe_client())

    def _check_end(self) -> None:
        if self._sends_no_more and self._in_request and not self._unparsed and not self._refused:
            self._refuse(ApiError(400, "the connection ended before the request did"))

    def _probe_client(self) -> bool:
        """Starts to find out whether a client that has stopped sending still reads. Returns False if that is impossible.

        The machine of a client that has left answers any bytes with a reset. Before an answer begins, 100 Continue is sent, which
        clients ignore. Later the next bytes of the answer are the probe; if there are none for SILENT_SECONDS, the client counts
        as gone, unless the system does not count the bytes that it takes. HTTP/1.0 has no 100 Continue, so its clients count as gone at
        once.
        """
        assert self._running is not None
        if self._running.scope["http_version"] == "1.0":
            return False
        if not self._running.response_started:
            self.transport.write(STATUS_LINE[100] + b"\r\n")
        self._check_probe(_PROBE_SECONDS[0], self.loop.time() + SILENT_SECONDS, self._tcp_state()[1])
        return True

    def _check_probe(self, pause: float, deadline: float, taken_before: int | None) -> None:
        """Ends the connection if the client has left; otherwise checks again after `pause`. Each pause is twice as long as the one before,
        because a machine nearby answers at once and a distant one later.
        """
        state, taken = self._tcp_state()
        if taken is None or taken_before is None or taken > taken_before:
            deadline = math.inf  # the client has taken bytes, so it reads; or that is not known, and only a reset shows that it has left
        if state == _TCP_CLOSED or self.loop.time() > deadline:
            self.transport.abort()
            return
        longer = min(2 * pause, _PROBE_SECONDS[1])
        self._look_timer = self.loop.call_later(pause, self._check_probe, longer, deadline, taken_before)

    def _complain(self, error: ApiError) -> None:
        self._complaint = error
        raise httptools.HttpParserError(error.message)

    def _refuse(self, error: ApiError) -> None:
        """Stops parsing. The request that has arrived in part gets `error` as its answer, after all requests before it have theirs."""
        self._refused, self._refusal = True, error
        broken = self.cycle if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete else None
        if self.pipeline and self.pipeline[0][0] is broken:
            self.pipeline.popleft()  # its route has not begun
        elif broken is not None:
            if broken.response_started:
                self._refusal = None  # it already has an answer
            _leave(broken)
        if not self._is_busy:
            self._end()

    @property
    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.response_complete and not self._running.disconnected

    def _end(self) -> None:
        """Sends the refusal, if there is one, and closes the connection."""
        if self.transport.is_closing():
            return
        if self._refusal is not None:
            answer = answer_for(self._refusal)
            body = json.dumps(answer.body).encode()
            head = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **answer.headers}
            lines = "".join(f"{name}: {value}\r\n" for name, value in {**head, "x-request-id": new_request_id()}.items())
            self.transport.write(STATUS_LINE[answer.status] + lines.encode() + b"\r\n" + body)
        self.transport.write_eof()
        self._watch_reader()
        self.loop.call_later(0 if self._sends_no_more else LINGER_SECONDS, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins the next request
        self._watch_reader()
        if self._unparsed and not self.pipeline:
            data, self._unparsed = bytes(self._unparsed), bytearray()
            self.data_received(data)
            self._check_end()
        if self._is_busy or self.transport.is_closing():
            return
        if self._refused:
            self._end()
        elif self._sends_no_more:
            self.transport.close()

    # --- clients that are slow -------------------------------------------------------------------------------------------

    def _start_read_timer(self) -> None:
        self._read_timer = self.loop.call_later(self._read_timeout, self._too_slow)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _too_slow(self) -> None:
        self._read_timer = None
        if self._is_busy:
            self._start_read_timer()  # the guard limits the time of a body that a route reads; a request that waits is not late
            return
        if self._refused or self.transport.is_closing():
            return
        if self._in_request:
            self._refuse(ApiError(408, f"the request did not arrive within {self._read_timeout:g} seconds (--read-timeout)"))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    @property
    def is_unread(self) -> bool:
        """Whether a part of an answer has not left this process."""
        return self.transport.get_write_buffer_size() > 0

    def _watch_reader(self) -> None:
        """Gives the client `write_timeout` to take more of the answer, from now on. Does nothing if all has been taken."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self.is_unread:
            self._write_timer = self.loop.call_later(self._write_timeout, self._look_at_reader, self._num_taken())

    def _look_at_reader(self, taken_before: int) -> None:
        self._write_timer = None
        if self.is_unread and self._num_taken() < taken_before + LEAST_BYTES:
            self.cut_off()
        else:
            self._watch_reader()

    def _num_taken(self) -> int:
        """Returns a number that grows by each byte of an answer that the client takes.

        Where these are not counted, the bytes that leave this process show it. Nothing is added to them: a route that has more to send
        waits, and when it goes on, the time begins again (`pause_writing`).
        """
        taken = self._tcp_state()[1]
        return -self.transport.get_write_buffer_size() if taken is None else taken

    def cut_off(self) -> None:
        """Resets the connection. After an ordinary close the kernel would keep the unread bytes for minutes."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _tcp_state(self) -> tuple[int, int | None]:
        """Returns the state of the connection, and how many bytes the client's machine has acknowledged (Linux: struct tcp_info).

        None: the system does not count them.
        """
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return info[0], struct.unpack_from("Q", info, 120)[0] if len(info) >= 128 else None


def _leave(cycle: RequestResponseCycle) -> None:
    """Ends a request as if its client had left: its route is informed, and further output of the route is not sent."""
    if not cycle.response_complete:
        cycle.disconnected = True
    cycle.message_event.set()
