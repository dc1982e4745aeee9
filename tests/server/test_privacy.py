"""Who may read the text of others: the rule by itself, what the operator is told of it, and what a real application shows."""

import json
from typing import Any

import pytest

from octavo.server.app import build_app
from octavo.server.guard import may_read_text
from octavo.server.listen import recording_has_text, who_reads
from octavo.server.records import Caller
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.support.http_server import HttpServer
from tests.support.stand_in_llm import StandInLLM

FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via", "CF-Connecting-IP", "CF-Ray",
             "True-Client-IP", "X-Client-IP", "Fly-Client-IP", "X-Envoy-External-Address", "CDN-Loop")  # fmt: skip
ONE, SEVERAL = {"api_key": ("k",)}, {"api_key": ("k", "l"), "admin_key": "a"}


# promise: text-view-only
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_without_a_key_text_is_for_this_machine(host: str) -> None:
    config = ServerConfig(host=host)
    assert may_read_text(config, "nobody", "localhost", [b"host", b"user-agent", b"accept"])
    assert not may_read_text(config, "nobody", "llm.example.org", [b"host"]), "a proxy kept the name it was called by"
    for name in FORWARDED:
        assert not may_read_text(config, "nobody", "localhost", [b"host", name.lower().encode()]), name


# promise: text-view-only
def test_a_server_that_others_reach_shows_text_to_keys_alone() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.7", "llm.example.org"):
        assert not may_read_text(ServerConfig(host=host), "nobody", "127.0.0.1", [])
        assert may_read_text(ServerConfig(host=host, admin_key="a"), "admin", "x", [b"via"])
    for host in ("0.0.0.0", "127.0.0.1"):
        assert may_read_text(ServerConfig(host=host, **ONE), "user", "x", [b"via"])
        assert may_read_text(ServerConfig(host=host, api_key=("k", "k")), "user", "x", [b"via"]), "one key, given twice"
        assert not may_read_text(ServerConfig(host=host, **SEVERAL), "user", "127.0.0.1", []), "several keys are several people"
        assert may_read_text(ServerConfig(host=host, **SEVERAL), "admin", "x", [b"via"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "127.0.0.1"}, None),
        ({"host": "127.0.0.1", "record": "r"}, None),
        ({}, "use this server and watch its blocks. Nobody can read the prompts and answers of others. Set --api-key"),
        ({"record": "r"}, "The recording r has no text. Set --api-key"),
        ({"inspector": False}, "everyone who can reach 0.0.0.0 can use this server. Set --api-key"),
        ({"admin_key": "a", "record": "r"}, "Only the admin key can read the prompts and answers of others. The recording r has their"),
        (ONE, "Everyone with the key can read all prompts and answers at /v1/view; --no-inspector removes it."),
        (ONE | {"inspector": False}, None),
        (SEVERAL, "Everyone with a key can use this server. Only the admin key can read"),
        ({"api_key": ("k", "l")}, "Nobody can read the prompts and answers of others."),
    ],
)
def test_the_operator_is_told_who_reads_what(settings: dict[str, Any], said: str | None) -> None:
    config = ServerConfig(**({"host": "0.0.0.0"} | settings))
    told = who_reads(config)
    assert told is None if said is None else told is not None and said in told, told
    if config.record:
        assert recording_has_text(config) == ("no text" not in (told or "")), "and it is true"


def test_the_view_has_text_by_this_rule_and_records_are_for_who_asked() -> None:
    def head(server: HttpServer, **headers: str) -> bool:
        with server.http.stream("GET", "/v1/view", headers={name.replace("_", "-"): value for name, value in headers.items()}) as answer:
            return bool(json.loads(next(answer.iter_lines()))["text"])

    def record(server: HttpServer, answer_id: str, **headers: str) -> int:
        return server.http.get(f"/v1/requests/{answer_id}", headers=headers).status_code

    with HttpServer(build_app(Server(StandInLLM(), ServerConfig(), "m"))) as server:  # type: ignore[arg-type]
        assert head(server) and not head(server, x_forwarded_for="192.0.2.9") and not head(server, via="1.1 proxy")
    with HttpServer(build_app(Server(StandInLLM(), ServerConfig(**SEVERAL), "m"))) as server:  # type: ignore[arg-type]
        assert not head(server, authorization="Bearer k") and head(server, authorization="Bearer a", via="1.1 proxy")
    config = ServerConfig(host="0.0.0.0", admin_key="a")
    with HttpServer(build_app(application := Server(StandInLLM(), config, "m"))) as server:  # type: ignore[arg-type]
        assert not head(server) and not head(server, authorization="Bearer x") and head(server, authorization="Bearer a")
        mine = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 1}).json()["id"]
        assert record(server, mine) == 200
        known = application.observer.records.get(mine)
        assert known is not None
        known.arrival = type(known.arrival)(caller=Caller("192.0.2.9"))  # as if another machine had asked
        assert record(server, mine) == 404 and record(server, mine, authorization="Bearer a") == 200
