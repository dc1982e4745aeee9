"""Processes that die, hang or are told to end while streams are open: clients hear of it in time, nobody is left over, codes tell."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.processes import SECONDS, environment
from tests.server.test_serve_cli import family, gone
from tests.support.fair_clock import FairClock
from tests.support.http_storm import WATCHED, held, seconds_until_idle
from tests.support.open_streams import text, while_streaming
from tests.support.server_process import ServerProcess
from tests.support.soaked import rarely

SLOW = {"OCTAVO_DEBUG": "runner=fake,forward.sleep=20", "OCTAVO_LOG_LEVEL": "INFO"}
FLAGS = ("--num-gpu-blocks-override", "2000", "--max-num-seqs", "32", "--tool-call-parser", "hermes")


def health(server: ServerProcess) -> int:
    return server.ask("GET", "/health").status


def until(server: ServerProcess, status: int) -> None:
    """Until /health answers so."""
    deadline = time.monotonic() + SECONDS
    while health(server) != status:
        assert time.monotonic() < deadline, f"/health is not {status}: {server.stderr[-2000:]}"
        time.sleep(0.01)


# promise: loading-draining-dead
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.timed("how soon clients get the error")
def test_an_engine_that_dies_or_stops_ends_streams_with_an_error_and_is_started_again(endless: str, how: signal.Signals) -> None:
    with ServerProcess(WATCHED, endless, *FLAGS, env=SLOW) as server:
        known, before = text(server), held(server)
        engine = server.ask("GET", "/watch").json["engine_pid"]
        noticed = 0.0

        async def kill() -> None:
            nonlocal noticed
            clock = FairClock()
            os.kill(engine, how)
            await asyncio.to_thread(until, server, 503)
            noticed = clock.seconds()

        ended = asyncio.run(while_streaming(server, 20, 400, kill))
        assert noticed < 1 and all(each.seconds < 2 for each in ended)
        assert {each.error_code for each in ended} == {"engine_dead"}
        refused = server.ask("POST", "/v1/completions", {"prompt": "a"})
        if refused.status != 200:  # it may be back already
            assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
            assert refused.error["code"] in ("unavailable", "engine_dead")
        until(server, 200)
        assert text(server) == known
        seconds_until_idle(server, before)
        assert gone({engine})


@pytest.mark.timed("how soon every API process knows of the death")
def test_every_api_process_hears_of_the_engines_death_in_time(endless: str) -> None:
    with ServerProcess(WATCHED, endless, *FLAGS, "--api-processes", "2", env=SLOW) as server:
        engine = _engine(server)
        _wait_for_a_second_answerer(server)

        async def kill() -> None:
            os.kill(engine, signal.SIGKILL)

        ended = asyncio.run(while_streaming(server, 20, 400, kill))
        assert {each.error_code for each in ended} == {"engine_dead"}
        assert max(each.seconds for each in ended) < 0.5  # before another engine could have told it
        until(server, 200)


# promise: max-restarts
def test_an_engine_that_dies_again_and_again_ends_the_server_with_a_code(endless: str) -> None:
    env = {"OCTAVO_DEBUG": "runner=fake,exit.sigkill@5"}
    with ServerProcess(WATCHED, endless, *FLAGS, "--max-restarts", "1", env=env) as server:
        for _ in range(2):
            until(server, 200)
            reply = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 50, "ignore_eos": True})
            assert reply.status == 503 and reply.error["code"] == "engine_dead"
        assert server.ended() == 1 and "the engine stayed dead" in server.stderr


def test_no_process_outlives_a_killed_server(endless: str) -> None:
    with ServerProcess(WATCHED, endless, *FLAGS, "--api-processes", "2", env=SLOW) as server:
        pids = family(server.process.pid)

        async def kill() -> None:
            server.process.kill()

        ended = asyncio.run(while_streaming(server, 8, 400, kill))
        assert len(pids) >= 3 and gone(pids)
        assert not any(each.is_whole for each in ended)


@pytest.mark.parametrize("processes", [*rarely("1"), "2"])
def test_sigterm_lets_twenty_streams_end_whole(endless: str, processes: str) -> None:
    with ServerProcess(WATCHED, endless, *FLAGS, "--api-processes", processes, env=SLOW) as server:
        pids = family(server.process.pid)

        async def terminate() -> None:
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(until, server, 503)
            assert server.ask("POST", "/v1/completions", {"prompt": "a"}).error["code"] == "draining"

        ended = asyncio.run(while_streaming(server, 20, 150, terminate))
        assert len(ended) == 20 and all(each.is_whole for each in ended)
        assert server.ended() == 0 and gone(pids) and "Traceback" not in server.stderr


def test_a_second_sigterm_ends_open_streams_at_once(endless: str) -> None:
    with ServerProcess(WATCHED, endless, *FLAGS, "--api-processes", "2", env=SLOW) as server:
        pids = family(server.process.pid)

        async def terminate() -> None:
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(until, server, 503)
            server.process.send_signal(signal.SIGTERM)

        ended = asyncio.run(while_streaming(server, 20, 400, terminate))
        assert not any(each.is_whole for each in ended)
        assert server.ended() == 1 and gone(pids)


@pytest.mark.parametrize("after", ["OCTAVO_DEBUG is set", "Reading the config", "Tokenizer loading"])
def test_sigterm_while_it_starts_ends_it_with_nothing_left(endless: str, after: str, tmp_path: Path) -> None:
    """From its first line on; before that nothing has begun, and a signal ends it as it ends any process."""
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", endless, "--api-processes", "2"]
    env = environment({"OCTAVO_DEBUG": "runner=fake", "TMPDIR": str(tmp_path)})
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env, text=True) as process:
        assert process.stderr is not None
        said = ""
        while after not in said:
            said += (line := process.stderr.readline())
            assert line, said
        time.sleep(0.15)
        pids = family(process.pid)
        process.send_signal(signal.SIGTERM)
        said += process.stderr.read()
        assert process.wait(SECONDS) == 0, said
    assert "Traceback" not in said and gone(pids) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [signal.SIGKILL, *rarely(signal.SIGSTOP)])
def test_an_api_process_that_dies_or_stops_is_started_again(endless: str, how: signal.Signals, tmp_path: Path) -> None:
    """Also where somebody has removed the temporary folder by whose name it finds the engine."""
    with ServerProcess(WATCHED, endless, *FLAGS, "--api-processes", "2", env={**SLOW, "TMPDIR": str(tmp_path)}, forks=False) as server:
        (sibling,) = family(server.process.pid) - {server.process.pid, _engine(server)}
        _wait_for_a_second_answerer(server)
        (folder,) = tmp_path.iterdir()
        shutil.rmtree(folder)
        os.kill(sibling, how)
        server.wait_for(re.compile("an API process ended with code -9"))
        assert gone({sibling})
        _wait_for_a_second_answerer(server)
        assert len(family(server.process.pid)) == 3 and text(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0


def _engine(server: ServerProcess) -> int:
    """Its number, told by the process that supervises it: the other one has no such window."""
    deadline = time.monotonic() + SECONDS
    while (watched := server.ask("GET", "/watch")).status != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid: int = watched.json["engine_pid"]
    return pid


def _wait_for_a_second_answerer(server: ServerProcess) -> None:
    """The watched process has a route that its sibling has not."""
    deadline = time.monotonic() + SECONDS
    while server.ask("GET", "/watch").status != 404:
        assert time.monotonic() < deadline, "one process answers everything"
        time.sleep(0.02)
