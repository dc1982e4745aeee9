"""`octavo serve --data-parallel-size`: several engines behind one door. One that dies or is replaced costs no client its stream."""

import asyncio
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_serve_cli import family, gone
from tests.support.engine_process import PATIENCE
from tests.support.heavy_watch import family as family_list
from tests.support.http_server import wait_for
from tests.support.open_streams import story, while_streaming
from tests.support.server_process import Reply, ServerProcess
from tests.support.soaked import rarely

FAKE = {"OCTAVO_DEBUG": "runner=fake,forward.sleep=10", "OCTAVO_LOG_LEVEL": "INFO"}
FLAGS = ("-dp", "3", "--num-gpu-blocks-override", "2000", "--max-num-seqs", "16", "--admin-key", "boss", "--max-restarts", "100")
BOSS = {"authorization": "Bearer boss"}


def engines(server: ServerProcess) -> dict[int, int]:
    """Number -> process id, of engines that are there. Those that are forked have the name of their module, others the command."""
    found = {}
    for pid in family_list(server.process.pid)[1:]:
        with suppress(OSError):
            name, command = (Path(f"/proc/{pid}/{file}").read_text() for file in ("comm", "cmdline"))
            if name.strip() == "octavo.engine.process"[:15] or "octavo.engine.process" in command:
                found[len(found)] = pid
    return found


def ready(server: ServerProcess) -> tuple[int, int]:
    told = server.ask("GET", "/health").json["engines"]
    return told["ready"], told["all"]


def restarts(server: ServerProcess) -> list[str]:
    told = server.ask("GET", "/metrics").body.decode()
    return sorted(re.findall(r'octavo:engine_restarts_total\{engine="\d",[^}]*\} (\d)', told))


def texts(server: ServerProcess, count: int, tokens: int) -> list[Any]:
    replies = [server.ask("POST", "/v1/completions", story(tokens, number) | {"include_timings": True}) for number in range(count)]
    return [reply.json["choices"][0]["text"] for reply in replies]


def streamed(reply: Reply | None) -> str:
    assert reply is not None
    return "".join(re.findall(r'"text": ?"((?:[^"\\]|\\.)*)"', reply.body.decode()))


# promise: data-parallel-size
@pytest.mark.parametrize("processes", [*rarely("1"), "2"])
def test_no_client_notices_that_engines_die_and_all_are_told_apart(endless: str, processes: str) -> None:
    with ServerProcess("octavo serve", endless, *FLAGS, "--api-processes", processes, env=FAKE) as server:
        wait_for(lambda: ready(server) == (3, 3))
        quiet = asyncio.run(while_streaming(server, 12, 60, lambda: asyncio.sleep(0)))
        pids = engines(server)
        assert len(pids) == 3

        for victim, how in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):

            async def kill(victim: int = victim, how: int = how) -> None:
                os.kill(pids[victim], how)

            ended = asyncio.run(while_streaming(server, 12, 60, kill))
            assert all(each.is_whole for each in ended), [each.reply and each.reply.body[-300:] for each in ended if not each.is_whole]
            assert [streamed(each.reply) for each in ended] == [streamed(each.reply) for each in quiet]
        wait_for(lambda: ready(server) == (3, 3))
        assert gone({pids[0], pids[1]})
        wait_for(lambda: restarts(server) == ["0", "1", "1"])
        assert 'octavo:generation_tokens_total{engine="all"' in server.ask("GET", "/metrics").body.decode()
        reply = server.ask("POST", "/v1/completions", story(8) | {"include_timings": True}).json
        timings = reply["timings"]
        assert timings["engine"] in (0, 1, 2) and timings["routing"] in ("prefix", "load") and timings["resumed"] == 0
        if processes == "1":
            record = server.ask("GET", f"/v1/requests/{reply['id']}").json["prompts"][0]
            assert (record["engine"], record["routing"], record["resumed"]) == (timings["engine"], timings["routing"], 0)
        left = set(family(server.process.pid))
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0 and gone(left)


def test_an_admin_has_all_engines_replaced_while_clients_are_served(endless: str) -> None:
    with ServerProcess("octavo serve", endless, *FLAGS, "--api-processes", "2", "--shutdown-timeout", "1", env=FAKE) as server:
        before = set(engines(server).values())
        assert len(before) == 3
        assert server.ask("POST", "/admin/restart").status == 401
        wanted = texts(server, 2, 20)
        for _ in range(3):  # whichever API process hears of it
            started = server.ask("POST", "/admin/restart", **BOSS)
            if started.status == 202:
                break
        assert (started.status, started.json) == (202, {"status": "restarting", "engines": 3})
        again = server.ask("POST", "/admin/restart", **BOSS)
        assert again.status == 409 and again.error["code"] == "restarting"
        deadline = time.monotonic() + 2 * PATIENCE
        while before & set(engines(server).values()) or ready(server) != (3, 3):
            assert texts(server, 2, 20) == wanted
            wait_for(lambda: ready(server)[0] >= 2)  # an API process may hear that one is back after the next one was taken
            assert time.monotonic() < deadline, server.stderr[-3000:]
        wait_for(lambda: server.stderr.count(" is ready again") == 3)
        told = re.findall(r"Engine (\d) (gets no new requests|is ready again)", server.stderr)
        assert told == [(number, what) for number in "012" for what in ("gets no new requests", "is ready again")], "one after the other"
        assert 'octavo:rolling_restarts_done_total{engine="all"' in server.ask("GET", "/metrics").body.decode()


def test_one_engine_is_as_it_was_and_is_not_replaced(endless: str) -> None:
    with ServerProcess("octavo serve", endless, "--num-gpu-blocks-override", "200", "--admin-key", "boss", env=FAKE) as server:
        assert server.ask("GET", "/health").json == {"status": "ready"}
        refused = server.ask("POST", "/admin/restart", **BOSS)
        assert refused.status == 400 and "--data-parallel-size" in refused.error["message"]
        timings = server.ask("POST", "/v1/completions", story(4) | {"include_timings": True}).json["timings"]
        assert not {"engine", "routing", "resumed"} & set(timings)
        assert 'octavo:generation_tokens_total{engine="0"' in server.ask("GET", "/metrics").body.decode()
