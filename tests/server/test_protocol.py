"""HTTP itself at a real server: where a request ends, what is none, clients that send no more, and clients that do not read."""

import asyncio
import contextlib
import json
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from starlette.types import Receive, Scope, Send

from octavo.server import protocol
from octavo.server.body import LARGE_BYTES as LARGE_BODY
from tests.support.http_server import HttpServer, wait_for
from tests.support.server_process import STAND_IN, Reply, ServerProcess, read_replies
from tests.support.watched_server import LARGE_BYTES

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = HEALTH[:-2] + b"Connection: close\r\n\r\n"
ONCE = b'{"prompt": "Once"}'
TOKENIZE = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(STAND_IN, "--write-timeout", "0.5") as server:
        yield server
        assert server.ask("GET", "/health").status == 200 and "Traceback" not in server.stderr, server.stderr


@pytest.fixture(scope="module")
def patient() -> Iterator[ServerProcess]:
    """For large answers: on a busy machine the client takes longer than half a second to read some of them."""
    with ServerProcess(STAND_IN) as server:
        yield server


def sent(server: ServerProcess, *pieces: bytes, end: bool = False) -> list[Reply]:
    """The answers, until the server closes; `end`: the client says that there is no more."""
    with server.connect(60) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.05)
        if end:
            sock.shutdown(socket.SHUT_WR)
        return read_replies(sock)


@pytest.mark.parametrize("wish", [H2C, WEBSOCKET, b"Upgrade: h2c\r\nConnection: close, upgrade\r\n"], ids=["h2c", "websocket", "close"])
def test_a_wish_to_upgrade_is_ignored_and_the_body_is_a_body(server: ServerProcess, wish: bytes) -> None:
    """Also where it comes later, in chunks, and looks like another request."""
    smuggled = json.dumps({"prompt": "Once", "extra": HEALTH.decode()}).encode() + HEALTH
    body = ONCE + b" " * (len(smuggled) - len(ONCE))
    head = TOKENIZE + wish + b"Content-Length: %d\r\n\r\n" % len(body)
    chunked = TOKENIZE + wish + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body)
    ends = [] if b"close" in wish else [200]  # what comes behind it
    for pieces in ((head + body + LAST,), (head, body, LAST), (head[:30], head[30:] + body[:9], body[9:] + LAST)):
        first, *others = sent(server, *pieces)
        assert first.status == 200 and first.json["tokens"] == [1, 403] and [reply.status for reply in others] == ends
    for pieces in ((chunked + body + b"\r\n0\r\n\r\n" + LAST,), (chunked, body + b"\r\n", b"0\r\n\r\n" + LAST)):
        first, *others = sent(server, *pieces)
        assert first.status == 200 and first.json["tokens"] == [1, 403] and [reply.status for reply in others] == ends
    (reply,) = sent(server, TOKENIZE + b"Connection: close\r\n" + wish + b"Content-Length: %d\r\n\r\n" % len(smuggled), smuggled)
    assert reply.status == 400 and "trailing characters" in reply.error["message"]


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEALTH, 405, "CONNECT"),
        (TOKENIZE + b"Transfer-Encoding: gzip, chunked\r\n\r\n12\r\n" + ONCE + b"\r\n0\r\n\r\n", 400, "is 'gzip, chunked'"),
        (TOKENIZE + b"Transfer-Encoding: gzip\r\n\r\n" + ONCE, 400, "Transfer-Encoding is 'gzip'"),
        (TOKENIZE + b"Transfer-Encoding: identity\r\n\r\n" + ONCE, 400, "Transfer-Encoding is 'identity'"),
        (TOKENIZE + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "Transfer-Encoding"),
        (TOKENIZE + b"Content-Length: 18\r\nTransfer-Encoding: chunked\r\n\r\n" + ONCE, 400, "Transfer-Encoding"),
        (TOKENIZE + b"Transfer-Encoding: chunked\r\nContent-Length: 18\r\n\r\n" + ONCE, 400, "Content-Length"),
        (TOKENIZE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + ONCE, 400, "chunk size"),
        (TOKENIZE + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + ONCE, 400, "chunk size"),
        (TOKENIZE + b"Transfer-Encoding: chunked\r\n\r\n12\r\n" + ONCE + b"more than it said", 400, "chunk"),
        (TOKENIZE + b"Content-Length: -1\r\n\r\n" + ONCE, 400, "Content-Length"),
        (b"\x00garbage", 400, "not a valid HTTP request"),
    ],
    ids=lambda value: repr(value[-60:]) if isinstance(value, bytes) else None,
)
def test_what_is_no_request_is_told_once_and_behind_what_was_one(server: ServerProcess, data: bytes, status: int, said: str) -> None:
    slow = b"POST /slow HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n" + b'{"words": 4}'
    for before in ((), (HEALTH, slow, HEALTH)):
        for pieces in ((b"".join(before) + data,), (b"".join(before), data)):
            with server.connect(60) as sock:
                for piece in filter(None, pieces):
                    sock.sendall(piece)
                    time.sleep(0.02)
                answer = b""
                while piece := sock.recv(65536):
                    answer += piece
            head, _, body = answer.rpartition(b"\r\n\r\n")
            assert answer.count(b"HTTP/1.1 200 OK") == len(before) and answer.count(b"HTTP/1.1 ") == len(before) + 1, answer
            assert b"HTTP/1.1 %d " % status in head and b"connection: close" in head.rpartition(b"HTTP/1.1")[2]
            assert said in json.loads(body)["error"]["message"], body


def test_a_client_that_sends_no_more_gets_all_its_answers(patient: ServerProcess) -> None:
    words = b'{"words": 8}'
    slow = b"POST /slow HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(words) + words
    (health,) = sent(patient, HEALTH, end=True)
    assert health.status == 200
    for pieces in ((slow,), (HEALTH + slow,)):
        last = sent(patient, *pieces, end=True)[-1]
        assert last.status == 200 and last.body.count(b"word") == 8
    long = json.dumps({"prompt": "Once " + "a" * LARGE_BODY}).encode()  # parsed, and tokenised, in threads
    replies = sent(patient, TOKENIZE + b"Content-Length: %d\r\n\r\n" % len(long) + long, end=True)
    assert replies[-1].status == 200 and replies[-1].json["count"] > LARGE_BODY // 2
    for cut in (TOKENIZE, TOKENIZE + b"Content-Length: 99\r\n\r\n" + ONCE, HEALTH[:9]):
        reply = sent(patient, cut, end=True)[-1]
        assert reply.status == 400 and "ended before" in reply.error["message"]


def asking(server: ServerProcess, path: str) -> socket.socket:
    """A client that asks, and then reads nothing, with little room for what it does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(10)
    sock.connect((server.host, server.port))
    sock.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
    return sock


def num_sockets(server: ServerProcess) -> int:
    """Connections that the process has."""
    place = f":{server.port:04X}"
    with open(f"/proc/{server.process.pid}/net/tcp") as table:
        return sum(line.split()[1].endswith(place) and line.split()[3] in ("01", "04", "05", "08") for line in table)


@pytest.mark.parametrize("path", ["/large", "/endless"])
def test_a_client_that_does_not_read_is_cut_off(server: ServerProcess, path: str) -> None:
    before = server.memory("VmRSS")
    socks = [asking(server, path) for _ in range(8)]
    wait_for(lambda: num_sockets(server) == 0)
    data = b""
    with pytest.raises(ConnectionResetError):
        while piece := socks[0].recv(2**20):
            data += piece
    assert data.startswith(b"HTTP/1.1 200") and len(data) < LARGE_BYTES
    for sock in socks:
        sock.close()
    assert server.memory("VmRSS") - before < 4 * LARGE_BYTES


def test_a_client_that_reads_slowly_gets_all(server: ServerProcess) -> None:
    """Ten times slower than the time limit would be, had it to take all at once."""
    start, length = time.monotonic(), 0
    with asking(server, "/large") as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**18)
        sock.sendall(LAST)
        while piece := sock.recv(2**18):
            length += len(piece)
            time.sleep(0.005)
    assert length > LARGE_BYTES - 6 and time.monotonic() - start > 0.6


@pytest.mark.soak
def test_sigterm_does_not_wait_for_clients_that_do_not_read() -> None:
    with ServerProcess(STAND_IN, "--shutdown-timeout", "1", "--write-timeout", "60") as server:
        socks = [asking(server, path) for path in ("/large", "/endless", "/large", "/endless")]
        wait_for(lambda: num_sockets(server) == 4)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended(30) == 0  # half of the time that a client may leave an answer unread
        assert "Traceback" not in server.stderr and "ERROR" not in server.stderr, server.stderr
        for sock in socks:
            sock.close()


async def answer_late_or_much(scope: Scope, receive: Receive, send: Send) -> None:
    """/late answers when RELEASED, /much has 16 MB in one piece, /pieces has them in many."""
    path = scope["path"]
    if path == "/late":
        while not RELEASED.is_set() and not LEFT.is_set():
            with contextlib.suppress(TimeoutError):
                if (await asyncio.wait_for(receive(), 0.01))["type"] == "http.disconnect":
                    LEFT.set()
    size, count = {"/late": (1, 1), "/much": (MUCH, 1), "/pieces": (MUCH // 250, 250)}[path]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(count):
        await send({"type": "http.response.body", "body": b"x" * size, "more_body": number < count - 1})


MUCH = 16_000_000
RELEASED, LEFT = threading.Event(), threading.Event()


@pytest.mark.soak
def test_without_a_count_of_acknowledged_bytes_clients_are_told_apart_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel whose tcp_info ends before that count."""
    monkeypatch.setattr(protocol, "_INFO_BYTES", 104)
    monkeypatch.setattr(protocol, "SILENT_SECONDS", 0.1)
    with HttpServer(answer_late_or_much, write_timeout=0.5) as server:
        port = int(server.url.rpartition(":")[2])

        def connect(path: str) -> socket.socket:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            sock.settimeout(60)
            sock.connect(("127.0.0.1", port))
            sock.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
            return sock

        with connect("/late") as sock:  # it sends no more, and waits
            sock.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
            RELEASED.set()
            data = b""
            while piece := sock.recv(4096):
                data += piece
            assert b"HTTP/1.1 200" in data and not LEFT.is_set()
        RELEASED.clear()
        with connect("/late") as sock:  # it sends no more, and leaves
            sock.shutdown(socket.SHUT_WR)
            time.sleep(0.05)
        wait_for(LEFT.is_set)
        for sock in [connect("/much"), connect("/pieces")]:  # they do not read
            with sock, pytest.raises(ConnectionResetError):
                ended = select.poll()
                ended.register(sock, 0)
                assert ended.poll(60_000)
                while sock.recv(2**16):
                    pass
        slow = {connect(path): 0 for path in ("/much", "/pieces")}  # they read slowly: for longer than the limit, but always something
        while min(slow.values()) < MUCH:
            for sock in slow:
                piece = sock.recv(2**16)
                slow[sock] += len(piece)
                assert piece or slow[sock] > MUCH
            time.sleep(0.005)
        for sock in slow:
            sock.close()
