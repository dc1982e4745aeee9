"""`octavo serve` as its user starts it, over FakeKV: the order in which things go wrong, the ready line, the processes, the end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.cli.args import Parser, server_configs
from octavo.cli.serve import add_arguments
from tests.cli.processes import ROOT, SECONDS, environment, octavo
from tests.docs.blocks import FENCE
from tests.support.engine_process import PATIENCE
from tests.support.http_server import wait_for
from tests.support.server_process import ServerProcess

NO_WEIGHTS = {"OCTAVO_DEBUG": "runner=fake"}


def family(pid: int) -> set[int]:
    """A process and all that descend from it."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = {pid}
    while more := {child for child, parent in pairs if parent in found} - found:
        found |= more
    return found


def gone(pids: set[int]) -> bool:
    """Whether they have all ended, which is waited for."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not any(map(_runs, pids)):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    except OSError:  # it has ended, perhaps while its file was read
        return False


# promise: octavo-serve-model, ready-one-line, v1-models-says
def test_it_serves_from_the_ready_line_to_the_exit_code(tmp_path: Path) -> None:
    with ServerProcess("octavo serve", env=NO_WEIGHTS, cwd=tmp_path, forks=False) as server:
        assert server.model == "SmolLM2-135M-Instruct" and server.host == "127.0.0.1"
        assert server.ask("GET", "/health").json == {"status": "ready"}
        (model,) = server.ask("GET", "/v1/models").json["data"]
        assert model["id"] == server.model and model["max_model_len"] == 8192 and model["demo"] is True
        prompt = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        sampling = {"temperature": 0.2, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": None}
        assert model["defaults"] == {**sampling, "system_prompt": prompt}
        tokens = server.ask("POST", "/tokenize", {"prompt": "Once upon a time"}).json["tokens"]
        assert server.ask("POST", "/detokenize", {"tokens": tokens}).json == {"prompt": "Once upon a time"}
        pids = family(server.process.pid)
        assert len(pids) >= 2
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0 and gone(pids)
        assert "Traceback" not in server.stderr and server.stderr.count("Octavo is ready") == 1


def started(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return octavo("serve", *words, cwd=cwd, env={**NO_WEIGHTS, "OCTAVO_LOG_LEVEL": "ERROR"})


# promise: port-8000-host
@pytest.mark.timed("a busy port is reported within a second")
def test_a_port_that_is_not_to_be_had_ends_it_within_a_second() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        used = min(_seconds("--port", port) for _ in range(2))
        run = started("--port", port)
    assert run.returncode == 1 and used < 1
    assert run.stderr == f"octavo: error: port {port} of 127.0.0.1 is in use; choose another one with --port (0: any free port)\n"
    run = started("--host", "192.0.2.1")
    assert run.returncode == 1 and re.fullmatch(r"octavo: error: port 8000 of 192\.0\.2\.1 cannot be used: [^\n]+\n", run.stderr)
    run = started("--host", "no.such.name.invalid")
    assert run.returncode == 1 and re.fullmatch(r"octavo: error: --host no\.such\.name\.invalid: [^\n]+\n", run.stderr)


def _seconds(*words: str) -> float:
    """Of one process's time, whoever else is busy here."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'octavo', 'serve', *sys.argv[1:]], stderr=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\nprint(used.ru_utime + used.ru_stime)"
    )
    run = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True)
    return float(run.stdout)


# promise: octavo-serve-model
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no/such"], "no/such"),
        (["a", "--max-queue", "x"], "invalid int value"),
        (["--port", "70000"], "port must be an integer from 0 to 65535, got 70000"),
        (["--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["--max-model-len", "8k", "--kv-cache-memory-bytes", "4m"], "--max-model-len is 8192, but"),
        (["--api-key", "a b"], "api_key must be 1 to 512 visible ASCII characters"),
    ],
)
def test_what_is_wrong_is_one_line_before_weights_load(words: list[str], said: str, tmp_path: Path) -> None:
    run = started("--port", "0", *words, cwd=tmp_path)
    assert run.returncode in (1, 2) and said in run.stderr and len(run.stderr.splitlines()) <= 2, run.stderr


def test_a_context_longer_than_the_models_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    env = {"OCTAVO_LOG_LEVEL": "ERROR", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = octavo("serve", "--port", "0", "--max-model-len", "100k", env=env)
    said = "--max-model-len is 102400, but the model's own maximum is 8192: lower it to 8192 or less"
    assert (run.returncode, run.stderr) == (1, f"octavo: error: {said}\n")


@pytest.mark.soak
@pytest.mark.parametrize("spoiled", ["tempfile.tempdir = '/proc'", "tempfile._candidate_tempdir_list = lambda: ['/proc']"])
def test_a_temporary_folder_that_takes_no_file_is_told_in_one_line(spoiled: str) -> None:
    """/proc stands for a folder that is full or cannot be written, for whoever runs this test."""
    program = f"import sys, tempfile; {spoiled}; from octavo.cli.main import main; sys.exit(main(['serve', '--port', '0']))"
    env = environment({**NO_WEIGHTS, "OCTAVO_LOG_LEVEL": "ERROR"})
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)
    said = r"octavo: error: no temporary file can be made[^\n]+; set TMPDIR to a folder that can be written and has room\n"
    assert run.returncode == 1 and re.fullmatch(said, run.stderr), run.stderr


# promise: port-8000-host, host-0-0
def test_it_listens_on_this_machine_alone_unless_told_otherwise(tmp_path: Path) -> None:
    parser = Parser(prog="octavo serve", allow_abbrev=False)
    add_arguments(parser)
    _, config = server_configs(parser.parse([]))
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    recording = tmp_path / "r.ndjson"
    with ServerProcess("octavo serve", "--host", "0.0.0.0", "--record", str(recording), env=NO_WEIGHTS) as server:
        said = "NO API KEY: everyone who can reach 0.0.0.0 can use this server and watch its blocks. Nobody can read the prompts"
        assert said in server.stderr and f"The recording {recording} has no text." in server.stderr
        assert server.ask("GET", "/v1/models", host="anything").status == 200
        wait_for(lambda: recording.read_bytes().count(b"\n") >= 2)
        assert json.loads(recording.read_bytes().splitlines()[0])["text"] is False


# promise: api-processes, tools-default-model
def test_several_processes_answer_on_one_port_and_none_outlives_the_first() -> None:
    flags = ("--api-processes", "2", "--api-key", "sk-secret", "--tool-call-parser", "hermes")
    with ServerProcess("octavo serve", *flags, env=NO_WEIGHTS, forks=False) as server:
        deadline, pids = time.monotonic() + SECONDS, family(server.process.pid)
        while server.stderr.count("unheard_of") < 2 and time.monotonic() < deadline:  # each process warns once
            assert server.ask("POST", "/tokenize", {"prompt": "a", "unheard_of": 1}, authorization="Bearer sk-secret").status == 200
        assert server.stderr.count("unheard_of") == 2 and len(pids) >= 3
        tool = {"type": "function", "function": {"name": "weather"}}
        asked = {"messages": [{"role": "user", "content": "weather?"}], "tools": [tool], "max_tokens": 2}
        for _ in range(8):  # whoever answers, it has a place for tools
            assert server.ask("POST", "/v1/chat/completions", asked, authorization="Bearer sk-secret").status == 200
        assert server.stderr.count("chat template has no place for tools") == 1
        assert all(b"sk-secret" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids - {server.process.pid})
        server.process.kill()
        assert gone(pids)


def test_an_engine_that_stays_dead_is_told_in_one_line_with_a_code() -> None:
    with ServerProcess("octavo serve", "--max-restarts", "0", env={**NO_WEIGHTS, "OCTAVO_LOG_LEVEL": "ERROR"}, forks=False) as server:
        (engine,) = family(server.process.pid) - {server.process.pid}
        os.kill(engine, signal.SIGKILL)
        assert server.ended() == 1
        assert server.stderr.splitlines()[-1] == "octavo: error: the engine stayed dead: it was ended by SIGKILL"
        assert "Traceback" not in server.stderr


def test_the_settings_shown_to_operators_are_settings(tmp_path: Path) -> None:
    (example,) = [found["text"] for found in FENCE.finditer((ROOT / "docs/operations.md").read_text()) if found["language"] == "toml"]
    (tmp_path / "octavo.toml").write_text(example)
    run = started("--config", "octavo.toml", "--show-config", cwd=tmp_path)
    assert run.returncode == 0 and re.search(r"max_body_bytes +16777216 +file octavo.toml", run.stdout)
