"""The guard, from outside: what it lets through, and in which form. What it refuses is in test_bad_inputs.py."""

import json
import threading
from collections.abc import Iterator

import pytest

from tests.support.http_server import wait_for
from tests.support.server_process import STAND_IN, Reply, ServerProcess

KEY, OTHER, ADMIN_KEY = "sk-first", "sk-second", "sk-admin"


@pytest.fixture(scope="module")
def open_server() -> Iterator[ServerProcess]:
    """On loopback, without a key."""
    with ServerProcess(STAND_IN, "--allowed-origins", "https://good.example") as server:
        yield server
        assert server.process.poll() is None and server.stderr.count("Traceback") <= 1, server.stderr  # of /fail


@pytest.fixture(scope="module")
def locked_server() -> Iterator[ServerProcess]:
    flags = ["--api-key", KEY, "--api-key", OTHER, "--admin-key", ADMIN_KEY]
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


def test_a_head_may_be_long_within_its_limits(open_server: ServerProcess) -> None:
    heads = [b"X: " + b"A" * 60_000 + b"\r\n", b"".join(b"X-%d: a\r\n" % number for number in range(200))]
    for head in heads:
        (reply,) = open_server.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + head + b"\r\n")
        assert reply.status == 200


# promise: x-request-id
@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("~" * 128, True), ("a" * 129, False), ("a b", False), ("é", False)])
def test_a_request_id_comes_back_if_it_is_short_and_printable(open_server: ServerProcess, given: str, kept: bool) -> None:
    for path in ("/health", "/nothing"):
        answer = open_server.ask("GET", path, x_request_id=given).headers["x-request-id"]
        assert answer == given if kept else answer.startswith("req-") and len(answer) == 36


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "-"}, 200),
        ({"content_type": ""}, 415),
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


# promise: body-without-type
def test_a_body_without_a_type_gets_the_answer_of_its_route_unless_a_foreign_page_sent_it(open_server: ServerProcess) -> None:
    assert refused(open_server.ask("POST", "/v1/nothing", {}, content_type="-"), 404, "not_found_error")
    assert "not valid JSON" in str(refused(open_server.ask("POST", "/tokenize", b"prompt=Once", content_type="-"), 400)["message"])
    for origin in ("https://evil.example", "null"):  # a page can send such a body without asking first
        reply = open_server.ask("POST", "/tokenize", {"prompt": "Once"}, content_type="-", origin=origin)
        assert refused(reply, 403, "permission_error")["code"] == "origin_not_allowed"


# promise: allowed-origins
def test_sites_that_were_named_and_our_own_may_ask(open_server: ServerProcess) -> None:
    wants = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    reply = open_server.ask("OPTIONS", "/v1/chat/completions", origin="https://good.example", **wants)
    assert reply.status == 204 and reply.headers["access-control-allow-origin"] == "https://good.example"
    assert "authorization" in reply.headers["access-control-allow-headers"] and reply.headers["vary"] == "Origin"
    reply = open_server.ask("GET", "/v1/models", origin="https://good.example")
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://good.example"
    own = f"{open_server.host}:{open_server.port}"
    assert open_server.ask("GET", "/v1/models", origin=f"http://{own}", host=own).status == 200


# promise: api-key, admin-key, environment-octavo-api, api-key-may, admin-key-opens
@pytest.mark.parametrize("key", [KEY, OTHER, "sk-environment", ADMIN_KEY])
def test_each_key_opens(locked_server: ServerProcess, key: str) -> None:
    assert locked_server.ask("GET", "/v1/models", authorization=f"Bearer {key}").status == 200
    assert locked_server.ask("GET", "/openapi.json", authorization=f"bearer {key}").status == 200
    admin = locked_server.ask("POST", "/reset_prefix_cache", authorization=f"Bearer {key}")
    if key == ADMIN_KEY:
        assert admin.json == {"status": "ok"}
    else:
        refused(admin, 403, "permission_error")


def test_what_fails_inside_is_told_to_the_log_alone(open_server: ServerProcess) -> None:
    assert refused(open_server.ask("GET", "/fail"), 500, "server_error")["code"] == "internal_error"
    wait_for(lambda: "no such thing" in open_server.stderr)


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
