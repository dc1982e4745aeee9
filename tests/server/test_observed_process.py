"""What an operator sees of a whole server, with two API processes and an engine that is killed: metrics, logs, a trace."""

import json
import os
import re
import signal
from pathlib import Path

from tests.server.test_metrics import samples_of
from tests.server.test_serve_cli import family
from tests.support.http_server import wait_for
from tests.support.server_process import READY, ServerProcess

FLAGS = ("--api-processes", "2", "--log-format", "json", "--enable-log-requests", "--metrics-prefix", "vllm:", "--trace", "t.json")


def engine_of(pid: int) -> int:
    (found,) = [each for each in family(pid) if b"engine.process" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return found


# promise: metrics, metrics-prefix-vllm, several-api-processes, log-lines-json
def test_two_processes_tell_one_story_of_an_engine_and_its_successor(tmp_path: Path) -> None:
    with ServerProcess("octavo serve", *FLAGS, env={"OCTAVO_DEBUG": "runner=fake,forward.raise@26"}, cwd=tmp_path, forks=False) as server:
        body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
        for number in range(8):
            assert server.ask("POST", "/v1/completions", body, x_request_id=f"mine-{number}").status == 200
        # whichever process answers
        told = [samples_of(server.ask("GET", "/metrics").body.decode(), "vllm:") for _ in range(8)]
        assert {(each["generation_tokens_total"], each["time_to_first_token_seconds_count"]) for each in told} == {(24, 8)}
        assert told[-1]["engine_restarts_total"] == 0
        for _ in range(8):  # what the engine says of itself comes to all of them, a few times a second
            wait_for(lambda: samples_of(server.ask("GET", "/metrics").body.decode(), "vllm:")["iteration_tokens_total_sum"] > 0)
        assert told[-1]["event_loop_lag_seconds_count"] > told[0]["event_loop_lag_seconds_count"] / 2 > 0
        assert server.ask("POST", "/v1/completions", body).status == 500
        counted = samples_of(server.ask("GET", "/metrics").body.decode(), "vllm:")["iteration_tokens_total_sum"]
        os.kill(engine_of(server.process.pid), signal.SIGKILL)
        wait_for(lambda: samples_of(server.ask("GET", "/metrics").body.decode(), "vllm:")["engine_restarts_total"] == 1)
        wait_for(lambda: server.ask("POST", "/v1/completions", body).status == 200)
        wait_for(lambda: samples_of(server.ask("GET", "/metrics").body.decode(), "vllm:")["iteration_tokens_total_sum"] > counted)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
    lines = [json.loads(line) for line in server.stderr.splitlines() if not READY.fullmatch(line)]
    assert all(set(line) >= {"time", "level", "message"} for line in lines)
    (failed,) = [line for line in lines if line["message"].startswith("step 26 failed")]  # the engine's own
    assert failed["level"] == "ERROR" and "fault point forward.raise" in failed["traceback"]
    assert {line.get("request_id") for line in lines} >= {f"mine-{number}" for number in range(8)}
    events = json.loads((tmp_path / "t.json").read_text() + "]")
    engines = {event["pid"] for event in events}
    assert len(engines) == 2 and engines == {event["pid"] for event in events if event["name"] == "step"}
    assert not re.search("Once", (tmp_path / "t.json").read_text())
