"""Row 75: schemas without end. (Rows 69 to 74 and 76 at the server: test_structured.py, tests/grammar/test_checker.py.)"""

import threading
from pathlib import Path

from tests.server.test_serve_cli import family
from tests.support.bad_inputs_row import COMPLETIONS, SOUND, Row, acted
from tests.support.bad_inputs_watch import Watched

SCHEMAS, WARM, CLIENTS = 1200, 600, 8  # the engine's cache is full of so many before what it takes is looked at
MOST_GROWTH = 12 * 2**20


def _read(pid: int, file: str, line: str) -> int:
    return int(Path(f"/proc/{pid}/{file}").read_text().partition(f"{line}:")[2].split()[0])


def _many_schemas(server: Watched) -> None:
    def ask(numbers: range) -> None:
        for number in numbers:
            schema = {"type": "object", "properties": {f"field{number}": {"type": "integer"}}, "required": [f"field{number}"]}
            reply = server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS] | {"structured_outputs": {"json": schema}, "max_tokens": 1})
            wrong.extend([] if reply.status == 200 and reply.json["choices"][0]["text"].strip() in ("", "{") else [reply])

    def ask_all(start: int, stop: int) -> None:
        threads = [threading.Thread(target=ask, args=(range(start + client, stop, CLIENTS),)) for client in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    wrong: list[object] = []
    ask_all(0, WARM)
    pids = family(server.process.process.pid)
    memory, written = ({pid: _read(pid, *where) for pid in pids} for where in (("status", "VmRSS"), ("io", "\nwrite_bytes")))
    ask_all(WARM, SCHEMAS)
    assert not wrong, wrong[:3]
    assert len(pids) == 3 and family(server.process.process.pid) == pids, "the child lives, and is one"
    for pid in pids:
        assert 1024 * (_read(pid, "status", "VmRSS") - memory[pid]) < MOST_GROWTH
        assert _read(pid, "io", "\nwrite_bytes") - written[pid] < 2**20


ROWS: list[Row] = [acted(75, "1,200 schemas, one request each", _many_schemas, "optimized", canary=False)]
