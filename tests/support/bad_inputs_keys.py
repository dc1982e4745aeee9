"""Section B: keys, the operator's routes, browsers; at a server that wants a key, and at one on loopback that wants none."""

import hashlib
import secrets
from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

from octavo.server.app import build_app
from octavo.server.errors import ApiError
from octavo.server.guard import ADMIN, OPEN, Keys
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.support.bad_inputs_http import refused
from tests.support.bad_inputs_row import COMPLETIONS, SOUND, Row, acted
from tests.support.bad_inputs_watch import ADMIN_KEY, KEY, OTHER_KEY, SECRETS, Watched
from tests.support.stand_in_llm import StandInLLM

SECRET_TEXT = "the prompt nobody logs"
WRONG = ("-", "", "Bearer", "Bearer ", f"Bearer  {KEY}", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY} ",
         f"Bearer {KEY[:-1]}", f"Bearer {KEY},{OTHER_KEY}", "Bearer " + "k" * 10_000)  # fmt: skip


def _without(server: Watched) -> None:
    for authorization in WRONG:
        for method, path in (("GET", "/v1/models"), ("POST", COMPLETIONS), ("GET", "/nothing"), ("POST", "/reset_prefix_cache")):
            body = SOUND[COMPLETIONS] if method == "POST" else b""
            reply = refused(server.ask(method, path, body, authorization=authorization), 401)
            assert reply.error["code"] == "invalid_api_key" and reply.headers["www-authenticate"] == "Bearer"
        assert server.ask("GET", "/health", authorization=authorization).status == 200


def _constant_time(server: Watched) -> Callable[[], None]:
    """Whatever is sent, the same is done: its digest is compared with those of all keys, also behind one that was equal."""
    keys = Keys(ServerConfig(api_key=(KEY, OTHER_KEY), admin_key=ADMIN_KEY))
    known = [hashlib.sha256(key.encode()).digest() for key in (KEY, OTHER_KEY, ADMIN_KEY)]
    sent = (KEY, OTHER_KEY, ADMIN_KEY, "", "x", KEY[:-1], KEY + "x", "x" * 1000)

    def act() -> None:
        for key in sent:
            with patch("octavo.server.guard.secrets.compare_digest", wraps=secrets.compare_digest) as compare, suppress(ApiError):
                keys.check("/v1/models", {b"authorization": f"Bearer {key}".encode()})
            digest = hashlib.sha256(key.encode()).digest()
            assert [call.args for call in compare.call_args_list] == [(digest, one) for one in known]
            right = key in (KEY, OTHER_KEY, ADMIN_KEY)
            assert server.ask("GET", "/v1/models", authorization=f"Bearer {key}").status == (200 if right else 401)

    return act


def _routes(config: ServerConfig) -> set[tuple[str, str]]:
    """Method and path, of the application's own list, so that a new route is tried, too; a name in a path is tried as it is written."""
    app = build_app(Server(StandInLLM(), config, "m"))  # type: ignore[arg-type]
    told = {(method, path) for path, operations in app.openapi()["paths"].items() for method in operations}
    return told | {("get", "/openapi.json"), ("get", "/"), ("get", "/web/main.js")}


def _every_route(server: Watched) -> Callable[[], None]:
    routes = _routes(ServerConfig(api_key=(KEY,), admin_key=ADMIN_KEY, lesson=True))
    closed = ADMIN | {"/v1/models", "/version", "/tokenize", COMPLETIONS, "/v1/view", "/v1/lesson"}
    assert {"/health", "/"} == OPEN and {path for _, path in routes} >= OPEN | closed

    def act() -> None:
        for method, path in sorted(routes):
            reply = server.ask(method.upper(), path, authorization="-")
            assert reply.status == (200 if path in OPEN or path.startswith("/web/") else 401), (method, path)

    return act


def _not_ascii(server: Watched) -> None:
    for authorization in ("Bearer \xff\xfe", f"Bearer {KEY}\xe9", "B\xe9arer x", "\xff"):
        refused(server.ask("GET", "/v1/models", authorization=authorization), 401)


def _admin(server: Watched) -> None:
    for key in (KEY, OTHER_KEY, SECRETS["OCTAVO_API_KEY"]):
        assert server.ask("GET", "/v1/models", authorization=f"Bearer {key}").status == 200
        refused(server.ask("POST", "/reset_prefix_cache", authorization=f"Bearer {key}"), 403)
    refused(server.ask("POST", "/reset_prefix_cache", authorization="-"), 401)
    assert server.ask("POST", "/reset_prefix_cache", authorization=f"Bearer {ADMIN_KEY}").json == {"status": "ok"}


def _others(server: Watched) -> None:
    """What was asked with one key is told to no other but the admin's."""
    answer = server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS], authorization=f"Bearer {KEY}").json["id"]
    refused(server.ask("GET", f"/v1/requests/{answer}", authorization=f"Bearer {OTHER_KEY}"), 404)
    for key in (KEY, ADMIN_KEY):
        assert server.ask("GET", f"/v1/requests/{answer}", authorization=f"Bearer {key}").status == 200


def _no_admin_route(server: Watched) -> Callable[[], None]:
    assert not ADMIN & {path for _, path in _routes(ServerConfig())}

    def act() -> None:
        for path in ADMIN:
            for authorization in ("-", f"Bearer {ADMIN_KEY}"):
                error = refused(server.ask("POST", path, authorization=authorization), 403).error
                assert error["code"] == "admin_key_required" and "start it with --admin-key KEY" in error["message"]

    return act


def _no_secrets(server: Watched) -> None:
    """What they tell is searched for secrets by the watch."""
    for path in ("/health", "/version", "/v1/models", "/openapi.json"):
        assert server.ask("GET", path).status == 200


def _log(server: Watched) -> None:
    for number in range(100):
        body = {"prompt": f"{SECRET_TEXT} {number}", "max_tokens": 1, "unknown_field": 1}
        assert server.ask("POST", f"{COMPLETIONS}?key={KEY}", body, x_request_id=f"logged-{number}").status == 200
    server.ask("GET", "/x%0aINFO%20forged%1b[31m")
    server.wait_until(lambda _: "forged" in server.process.stderr, 1, "the log")
    log = server.process.stderr
    assert log.count(f"POST {COMPLETIONS} 200") >= 100 and "logged-99" in log and "\x1b" not in log and "\nINFO" not in log
    assert not any(secret in log for secret in (KEY, OTHER_KEY, ADMIN_KEY, SECRET_TEXT, *SECRETS.values()))
    assert log.count("unknown_field") == 1


def _origins(server: Watched) -> None:
    wants = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    for origin in ("http://evil.com", "http://localhost.evil.com", "null", "https://good.example.evil.com", "http://good.example"):
        reply = server.ask("OPTIONS", COMPLETIONS, origin=origin, **wants)
        assert reply.status == 204 and not [name for name in reply.headers if name.startswith("access-control")]
        refused(server.ask("GET", "/v1/models", origin=origin), 403)
    reply = server.ask("OPTIONS", COMPLETIONS, origin="https://good.example", **wants)
    assert reply.status == 204 and reply.headers["access-control-allow-origin"] == "https://good.example"


def _rebinding(server: Watched) -> None:
    for host in ("attacker.tld", "127.0.0.1.evil.com", "localhost.evil.com:8000", "10.0.0.1", "0.0.0.0"):
        refused(server.ask("GET", "/v1/models", host=host), 403)
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.8.9.1:80", "[::1]:8000", "named"):
        assert server.ask("GET", "/v1/models", host=host).status == 200


ROWS: list[Row] = [
    acted(19, "no key, or a wrong one", _without, "locked"),
    Row(20, "every route without a key", _every_route, "locked"),
    Row(21, "keys in constant time", _constant_time, "locked"),
    acted(22, "keys that are not ASCII", _not_ascii, "locked"),
    acted(23, "the operator's route with a user's key", _admin, "locked"),
    acted(23, "the record of another key's request", _others, "locked"),
    Row(23, "the operator's route where there is none", _no_admin_route),
    acted(24, "what is told of the server", _no_secrets, "locked"),
    acted(25, "the log", _log, "locked"),
    acted(26, "origins", _origins),
    acted(27, "DNS rebinding", _rebinding),
]
