"""The guard, from outside: raw bytes at a real server, every refusal in one form, and the next question answered as ever."""

import json
import threading
import time
from collections.abc import Iterator

import pytest

from octavo.server.app import build_app
from octavo.server.keys import ADMIN, OPEN
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.support.server_process import Reply, ServerProcess, read_replies
from tests.support.stand_in_llm import StandInLLM

STAND_IN = "tests.support.stand_in_server"
KEY, OTHER, ADMIN_KEY = "sk-first", "sk-second", "sk-admin"
SECRET_TEXT = "the prompt nobody logs"


@pytest.fixture(scope="module")
def open_server() -> Iterator[ServerProcess]:
    """On loopback, without a key."""
    with ServerProcess(
        STAND_IN, "--max-body-bytes", "64k", "--read-timeout", "1", "--allowed-origins", "https://good.example", "--allowed-hosts", "named"
    ) as server:
        yield server
        assert server.process.poll() is None and server.stderr.count("Traceback") <= 1, server.stderr  # of /fail


@pytest.fixture(scope="module")
def locked_server() -> Iterator[ServerProcess]:
    flags = ["--api-key", KEY, "--api-key", OTHER, "--admin-key", ADMIN_KEY, "--enable-log-requests"]
    with ServerProcess(STAND_IN, *flags, env={"OCTAVO_API_KEY": "sk-environment"}) as server:
        yield server


@pytest.fixture(autouse=True)
def as_ever(open_server: ServerProcess) -> Iterator[None]:
    """Whatever a test did, the server goes on."""
    yield
    assert open_server.ask("POST", "/detokenize", {"tokens": [403, 407]}).json == {"prompt": "Once upon"}


def refused(reply: Reply, status: int, kind: str = "invalid_request_error") -> dict[str, object]:
    assert reply.status == status, reply
    assert reply.headers["x-request-id"].startswith("req-") and reply.error["type"] == kind
    return reply.error


# --- heads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X-Forwarded-For: " + b"A" * 2**23 + b"\r\n", 431),
        (b"".join(b"X-%d: a\r\n" % number for number in range(10_000)), 431),
        (b"".join(b"X-%d: a\r\n" % number for number in range(1000)), 431),
        (b"X: " + b"A" * 60_000 + b"\r\n", 200),
        (b"".join(b"X-%d: a\r\n" % number for number in range(200)), 200),
    ],
    ids=["8 MiB", "10,000 headers", "1,000 headers", "60 KB", "200 headers"],
)
def test_a_head_has_a_length(open_server: ServerProcess, head: bytes, status: int) -> None:
    open_server.ask("GET", "/health")
    before = open_server.memory("VmRSS")
    with open_server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + head + b"\r\n")  # it may be said to the end
        (reply,) = read_replies(sock)
    assert reply.status == status
    if status != 200:
        refused(reply, 431)
        assert reply.headers["connection"] == "close"
        assert open_server.memory("VmHWM") - before < 10 * 2**20


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1", 414),
        (b"GET /health?" + b"a" * 100_000 + b" HTTP/1.1", 414),
        (b"GET /nothing HTTP/1.1", 404),
        (b"POST /health HTTP/1.1", 405),
        (b"DELETE /v1/models HTTP/1.1", 405),
        (b"GET /v1//models HTTP/1.1", 404),
        (b"GET //v1/models HTTP/1.1", 404),
        (b"GET /v1/models/../health HTTP/1.1", 404),
        (b"GET /v1/models//x HTTP/1.1", 404),
        (b"GET /v1/../admin HTTP/1.1", 404),
        (b"GET /v1/../health HTTP/1.1", 404),
        (b"GET /v1/%2e%2e/health HTTP/1.1", 404),
        (b"GET /v1/..%2fhealth HTTP/1.1", 404),
        (b"GET /health/ HTTP/1.1", 404),
        (b"GET /docs HTTP/1.1", 404),
        (b"GET /redoc HTTP/1.1", 404),
        (b"GET /he\x00lth HTTP/1.1", 400),
        (b"GET /\xff HTTP/1.1", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"NONSENSE", 400),
        (b"OPTIONS * HTTP/1.1", 404),
    ],
    ids=repr,
)
def test_a_first_line_without_meaning_is_told_in_json(open_server: ServerProcess, first: bytes, status: int) -> None:
    (reply,) = open_server.send(first + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert refused(reply, status, "not_found_error" if status == 404 else "invalid_request_error")["code"] is None


@pytest.mark.parametrize("host", ["x/v1/models?", "x#", "x y", "a@b", "localhost:99999999", "", "[::1", "é"], ids=repr)
def test_a_host_is_a_name_and_a_port(open_server: ServerProcess, host: str) -> None:
    refused(open_server.ask("GET", "/health", host=host), 400)


def test_no_header_that_decides_is_there_twice(open_server: ServerProcess) -> None:
    for twice in (b"Host: localhost\r\nHost: evil\r\n", b"Host: localhost\r\nAuthorization: a\r\nAuthorization: b\r\n"):
        (reply,) = open_server.send(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n" + twice + b"\r\n")
        refused(reply, 400)


def test_a_second_request_in_the_pipeline_is_not_mixed_up(open_server: ServerProcess) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: second\r\n\r\n"
    for first, status in (
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 415),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    ):
        replies = open_server.send(first + health)
        assert replies[0].status == status and len(replies) <= 2
        if len(replies) == 2:
            assert replies[1].json == {"status": "ready"} and replies[1].headers["x-request-id"] == "second"
        else:
            assert replies[0].headers["connection"] == "close"
    replies = open_server.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n\x00garbage")
    assert [reply.status for reply in replies][:1] in ([200], []) and len(replies) <= 2


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("~" * 128, True), ("a" * 129, False), ("a b", False), ("é", False)])
def test_a_request_id_comes_back_if_it_is_short_and_printable(open_server: ServerProcess, given: str, kept: bool) -> None:
    for path in ("/health", "/nothing"):
        answer = open_server.ask("GET", path, x_request_id=given).headers["x-request-id"]
        assert answer == given if kept else answer.startswith("req-") and len(answer) == 36


# --- bodies --------------------------------------------------------------------------------------------------------------


def test_a_body_too_long_is_refused_before_it_is_read(open_server: ServerProcess) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    start = time.monotonic()
    (reply,) = open_server.send(head + b"Content-Length: 1073741824\r\n\r\n", most=1)
    assert refused(reply, 413)["code"] == "body_too_large" and reply.headers["connection"] == "close"
    (reply,) = open_server.send(head + b"Expect: 100-continue\r\nContent-Length: 1073741824\r\n\r\n", most=1)
    refused(reply, 413)
    with open_server.connect() as sock:
        sock.sendall(head + b"Content-Length: 8388608\r\n\r\n" + b" " * 2**23)  # one that is said to the end all the same
        refused(*read_replies(sock, most=1), 413)
    assert time.monotonic() - start < 5


def test_an_endless_body_is_refused_when_it_is_too_long(open_server: ServerProcess) -> None:
    open_server.ask("GET", "/health")
    before = open_server.memory("VmRSS")
    with open_server.connect() as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent, end = 0, time.monotonic() + 5
        try:
            while time.monotonic() < end:
                sock.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
                sent += 65536
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert sent < 2**33 and time.monotonic() < end  # it was cut off
        (reply,) = read_replies(sock)
    refused(reply, 413)
    assert open_server.memory("VmHWM") - before < 10 * 2**20


def test_slow_clients_are_not_waited_for_and_others_are_not_kept_waiting(open_server: ServerProcess) -> None:
    """One is slow with its head, one with its body, one says nothing; the read time-out here is a second."""
    post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    begun = {"head": b"GET /health HTTP/1.1\r\nX: ", "body": post}
    socks = {name: [open_server.connect(4) for _ in range(60)] for name in ("head", "body", "silent")}
    start = time.monotonic()
    for name, data in begun.items():
        for sock in socks[name]:
            sock.sendall(data)
    while time.monotonic() - start < 0.7:
        asked = time.monotonic()
        assert open_server.ask("GET", "/health").status == 200 and time.monotonic() - asked < 0.5
        for name in begun:
            for sock in socks[name]:
                sock.sendall(b"1")
        time.sleep(0.1)
    for name, each in socks.items():
        for sock in each:
            replies = read_replies(sock)
            assert [reply.status for reply in replies] == ([] if name == "silent" else [408])
            sock.close()
    assert time.monotonic() - start < 8


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "-"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_type": "application/json; charset=latin-1"}, 415),
        ({"content_type": "Application/JSON; charset=UTF-8"}, 200),
        ({"content_encoding": "gzip"}, 415),
        ({"content_encoding": "br"}, 415),
        ({"content_encoding": "identity"}, 200),
    ],
    ids=repr,
)
def test_a_body_is_plain_json(open_server: ServerProcess, headers: dict[str, str], status: int) -> None:
    reply = open_server.ask("POST", "/tokenize", {"prompt": "Once"}, **headers)
    assert reply.status == status
    if status != 200:
        refused(reply, status)


# --- who may ask -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [("attacker.tld", 403), ("127.0.0.1.evil.com", 403), ("localhost.evil.com:8000", 403), ("10.0.0.1", 403), ("0.0.0.0", 403),
     ("localhost", 200), ("LOCALHOST:1", 200), ("127.0.0.1", 200), ("127.8.9.1:80", 200), ("[::1]:8000", 200), ("named", 200)],
)  # fmt: skip
def test_a_server_on_loopback_without_a_key_is_called_by_its_names(open_server: ServerProcess, host: str, status: int) -> None:
    reply = open_server.ask("GET", "/v1/models", host=host)
    assert reply.status == status
    if status != 200:
        refused(reply, 403, "permission_error")


@pytest.mark.parametrize("origin", ["http://evil.com", "http://localhost.evil.com", "null", "https://good.example.evil.com", "http://good.example"])
def test_a_site_nobody_named_may_not_ask(open_server: ServerProcess, origin: str) -> None:
    wants = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    reply = open_server.ask("OPTIONS", "/v1/chat/completions", origin=origin, **wants)
    assert reply.status == 204 and not [name for name in reply.headers if name.startswith("access-control")]
    refused(open_server.ask("GET", "/v1/models", origin=origin), 403, "permission_error")


def test_sites_that_were_named_and_our_own_may_ask(open_server: ServerProcess) -> None:
    wants = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    reply = open_server.ask("OPTIONS", "/v1/chat/completions", origin="https://good.example", **wants)
    assert reply.status == 204 and reply.headers["access-control-allow-origin"] == "https://good.example"
    assert "authorization" in reply.headers["access-control-allow-headers"] and reply.headers["vary"] == "Origin"
    reply = open_server.ask("GET", "/v1/models", origin="https://good.example")
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://good.example"
    own = f"{open_server.host}:{open_server.port}"
    assert open_server.ask("GET", "/v1/models", origin=f"http://{own}", host=own).status == 200


WRONG_KEYS = ["-", "", "Bearer", "Bearer ", "Bearer  " + KEY, "Bearer wrong", "Basic " + KEY, KEY, f"Bearer {KEY}x", f"Bearer {KEY} ",
              f"Bearer {KEY[:-1]}", f"Bearer {KEY},{OTHER}", "Bearer \xff\xfe", "Bearer " + "k" * 10_000]  # fmt: skip


@pytest.mark.parametrize("authorization", WRONG_KEYS, ids=lambda text: ascii(text[:20]))
def test_without_a_key_nothing_is_told(locked_server: ServerProcess, authorization: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nothing"), ("POST", "/reset_prefix_cache")):
        reply = locked_server.ask(method, path, b"{}" if method == "POST" else b"", authorization=authorization)
        assert refused(reply, 401, "authentication_error")["code"] == "invalid_api_key"
    assert locked_server.ask("GET", "/health", authorization=authorization).status == 200


@pytest.mark.parametrize("key", [KEY, OTHER, "sk-environment", ADMIN_KEY])
def test_each_key_opens(locked_server: ServerProcess, key: str) -> None:
    assert locked_server.ask("GET", "/v1/models", authorization=f"Bearer {key}").status == 200
    assert locked_server.ask("GET", "/openapi.json", authorization=f"bearer {key}").status == 200
    admin = locked_server.ask("POST", "/reset_prefix_cache", authorization=f"Bearer {key}")
    if key == ADMIN_KEY:
        assert admin.json == {"status": "ok"}
    else:
        refused(admin, 403, "permission_error")


def test_every_route_wants_a_key_but_those_that_are_open(locked_server: ServerProcess) -> None:
    """Of the application's own list, so that a new route is tried, too; a name in a path is tried as it is written."""
    app = build_app(Server(StandInLLM(), ServerConfig(api_key=(KEY,), admin_key=ADMIN_KEY), "m"))  # type: ignore[arg-type]
    routes = {(method, path) for path, operations in app.openapi()["paths"].items() for method in operations} | {("get", "/openapi.json")}
    assert {"/health"} == OPEN and {path for _, path in routes} >= OPEN | ADMIN | {"/v1/models", "/version", "/tokenize"}
    for method, path in sorted(routes):
        reply = locked_server.ask(method.upper(), path)
        assert reply.status == (200 if path in OPEN else 401), (method, path)


def test_admin_routes_are_not_there_without_an_admin_key(open_server: ServerProcess) -> None:
    app = build_app(Server(StandInLLM(), ServerConfig(), "m"))  # type: ignore[arg-type]
    assert not ADMIN & set(app.openapi()["paths"])
    refused(open_server.ask("POST", "/reset_prefix_cache", authorization=f"Bearer {ADMIN_KEY}"), 401, "authentication_error")


def test_a_log_tells_requests_and_neither_keys_nor_texts(locked_server: ServerProcess) -> None:
    for number in range(100):
        body = {"prompt": f"{SECRET_TEXT} {number}", "unknown_field": 1}
        path = f"/tokenize?key={KEY}"
        assert locked_server.ask("POST", path, body, authorization=f"Bearer {KEY}", x_request_id=f"logged-{number}").status == 200
    locked_server.ask("GET", "/x%0aINFO%20forged%1b[31m", authorization=f"Bearer {KEY}")
    time.sleep(0.2)
    log = locked_server.stderr
    assert log.count("POST /tokenize 200") >= 100 and "logged-99" in log and "\x1b" not in log and "\nINFO" not in log
    assert not any(secret in log for secret in (KEY, OTHER, ADMIN_KEY, "sk-environment", SECRET_TEXT))
    assert log.count("unknown_field") == 1


def test_what_fails_inside_is_told_to_the_log_alone(open_server: ServerProcess) -> None:
    assert refused(open_server.ask("GET", "/fail"), 500, "server_error")["code"] == "internal_error"
    time.sleep(0.1)
    assert "no such thing" in open_server.stderr


def test_many_at_once_are_each_answered_with_their_own(open_server: ServerProcess) -> None:
    wrong: list[Reply] = []

    def ask(number: int) -> None:
        for turn in range(10):
            name = f"client-{number}-{turn}"
            reply = open_server.ask("POST", "/tokenize", {"prompt": "Once " * number}, x_request_id=name)
            if reply.headers["x-request-id"] != name or json.loads(reply.body)["tokens"].count(403) != number:
                wrong.append(reply)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
