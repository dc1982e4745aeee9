"""/v1/prefixes at a server with two engines and two API processes: any of them takes an order, and all of them know of it."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message

from octavo.inspector.state import ViewState
from octavo.server.app import build_app
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.server.test_view import Watching
from tests.support.http_server import wait_for
from tests.support.http_storm import WATCHED
from tests.support.server_process import ServerProcess
from tests.support.stand_in_llm import StandInLLM

PREFIXES = "/v1/prefixes"
FLAGS = ("--num-gpu-blocks-override", "200", "--max-model-len", "256", "--max-num-seqs", "8", "--routing", "turns")
FAKE = {"OCTAVO_DEBUG": "runner=fake,check=1", "OCTAVO_LOG_LEVEL": "WARNING"}
PROMPT = list(range(3, 53))
ASKED = 8  # requests, so that every API process answers some


@pytest.fixture(scope="module")
def started(endless: str) -> Iterator[ServerProcess]:
    with ServerProcess(WATCHED, endless, *FLAGS, "-dp", "2", "--api-processes", "2", env=FAKE) as server:
        wait_for(lambda: all(server.ask("GET", "/health").json["engines"]["ready"] == 2 for _ in range(ASKED)))  # in each API process
        yield server
        assert "Traceback" not in server.stderr, server.stderr[-3000:]


@pytest.fixture
def server(started: ServerProcess) -> Iterator[ServerProcess]:
    """One that has nothing pinned, also after a test that failed."""
    yield started
    for prefix in started.ask("GET", PREFIXES).json["data"]:
        started.ask("DELETE", f"{PREFIXES}/{prefix['name']}")


def listed(server: ServerProcess) -> list[list[dict[str, Any]]]:
    """What several askers are told."""
    return [server.ask("GET", PREFIXES).json["data"] for _ in range(ASKED)]


def metric(server: ServerProcess, name: str) -> float:
    """Of all engines."""
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"octavo:{name}{{"))


def pinned(state: ViewState) -> int:
    return sum(sealed > 1 for sealed in state.sealed)


# promise: v1-prefixes, pinned-prefix-everywhere, pinned-prefix-seen
def test_any_process_pins_for_all_and_what_is_pinned_is_seen(server: ServerProcess) -> None:
    watching = Watching(server)
    answers = [server.ask("POST", PREFIXES, {"name": f"p{number}", "prompt": [number, *PROMPT], "ttl": 600}) for number in range(3, 7)]
    assert [reply.status for reply in answers] == [200] * 4, answers
    made = answers[0].json
    assert made.pop("expires_at") and made == {
        "object": "prefix", "name": "p3", "state": "held", "prompt_tokens": 51, "tokens": 48, "blocks": 3, "hits": 0, "tokens_saved": 0,
    }  # fmt: skip
    assert server.ask("POST", PREFIXES, {"name": "p3", "prompt": PROMPT}).status == 409
    assert all([one["name"] for one in found] == ["p3", "p4", "p5", "p6"] for found in listed(server))
    wait_for(lambda: pinned(watching.state) == 12)
    for _ in range(4):
        answer = server.ask("POST", "/v1/completions", {"prompt": [3, *PROMPT, 9], "max_tokens": 2}).json
        assert answer["usage"]["prompt_tokens"] == 52
    wait_for(lambda: all(found[0]["hits"] == 4 and found[0]["tokens_saved"] == 192 for found in listed(server)))
    numbers = {"pinned_blocks": 24, "pinned_prefix_hits_total": 4, "pinned_prefix_tokens_total": 192}
    wait_for(lambda: {name: metric(server, name) for name in numbers} == numbers)
    wait_for(lambda: any(event[2] == "pin" and event[3:] == [3, 48] for event in watching.state.events))
    assert not any("p3" in str(frame) for frame in watching.frames), "names are not for whoever watches"
    for number in range(3, 7):
        assert server.ask("DELETE", f"{PREFIXES}/p{number}").json == {"object": "prefix", "name": f"p{number}", "deleted": True}
        assert server.ask("GET", f"{PREFIXES}/p{number}").status == 404
    wait_for(lambda: pinned(watching.state) == 0 and metric(server, "pinned_blocks") == 0)
    wait_for(lambda: metric(server, "kv_cache_usage_perc") == 0)
    assert any(event[2] == "unpin" for event in watching.state.events)


def test_a_killed_engine_comes_back_pinned_whoever_had_ordered_it(server: ServerProcess) -> None:
    for number in range(4):
        assert server.ask("POST", PREFIXES, {"name": f"k{number}", "prompt": [number + 3, *PROMPT]}).status == 200
    pid = next(pid for _ in range(50) if (pid := server.ask("GET", "/watch").json.get("engine_pid")))  # one process knows it
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.ask("GET", "/health").json["engines"]["ready"] == 1)
    wait_for(lambda: server.ask("GET", "/health").json["engines"]["ready"] == 2)
    wait_for(lambda: all(one["state"] == "held" for found in listed(server) for one in found))
    wait_for(lambda: metric(server, "pinned_blocks") == 24)
    for number in range(4):
        assert server.ask("DELETE", f"{PREFIXES}/k{number}").status == 200
    wait_for(lambda: metric(server, "kv_cache_usage_perc") == 0)


def test_a_record_tells_what_was_found_in_a_pinned_prefix(server: ServerProcess) -> None:
    assert server.ask("POST", PREFIXES, {"name": "r", "prompt": PROMPT, "cache_salt": "mine"}).status == 200
    found = set()
    for salt in ({"cache_salt": "mine"}, {"cache_salt": "theirs"}, {}):
        answer = server.ask("POST", "/v1/completions", {"prompt": [*PROMPT, 5], "max_tokens": 1} | salt).json
        records = (server.ask("GET", f"/v1/requests/{answer['id']}") for _ in range(50))  # kept by the process that answered
        record = next(reply.json for reply in records if reply.status == 200)["prompts"][0]
        found.add((salt.get("cache_salt"), record["pinned_tokens"], record["cached_tokens"]))
    assert found == {("mine", 48, 48), ("theirs", 0, 0), (None, 0, 0)}
    assert server.ask("DELETE", f"{PREFIXES}/r").status == 200


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({"api_key": ("user",), "admin_key": "admin"}, {"user": 403, "admin": 200, "": 401}),
        ({"api_key": ("user",)}, {"user": 403, "": 401}),
        ({"admin_key": "admin"}, {"admin": 200, "": 401}),
        ({}, {"": 200}),
        ({"host": "0.0.0.0"}, {"": 403}),
    ],
)
def test_prefixes_are_for_admins_where_there_are_keys_and_for_this_machine_where_there_are_none(
    settings: dict[str, Any], statuses: dict[str, int]
) -> None:
    async def asked(key: str) -> int:
        headers = [(b"host", b"127.0.0.1"), *([(b"authorization", f"Bearer {key}".encode())] if key else [])]
        scope = {"type": "http", "method": "GET", "path": PREFIXES, "raw_path": b"", "query_string": b"", "headers": headers}
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await build_app(Server(StandInLLM(), ServerConfig(**settings), "m"))(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        return int(sent[0]["status"])

    assert {key: asyncio.run(asked(key)) for key in statuses} == statuses
