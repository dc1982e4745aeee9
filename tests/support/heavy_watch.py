"""What others see of a server that is kept busy: whether they are answered, what its processes hold.

`python -m tests.support.heavy_watch HOST PORT` is the process that asks for little, all the time.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.cli.processes import ROOT, environment
from tests.support.fair_clock import family
from tests.support.heavy_requests import CHAT, MESSAGES
from tests.support.server_process import ServerProcess

MOST_GROWTH = 300 * 2**20
SMALL = {"messages": MESSAGES, "max_tokens": 2, "priority": 0}
NO_ANSWER = 0


@dataclass(frozen=True)
class Asked:
    """One question of the process that asks."""

    at: float  # by the clock of all processes
    what: str
    seconds: float
    status: int


class Asker:
    """Asks for little, all the time, from a process of its own, so that nothing here makes it late."""

    def __init__(self, server: ServerProcess) -> None:
        command = [sys.executable, "-m", "tests.support.heavy_watch", server.host, str(server.port)]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment({}), stdout=subprocess.PIPE, text=True)
        self._asked: list[Asked] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._asked.append(Asked(**json.loads(line)))

    def __enter__(self) -> "Asker":
        assert self.answered_after(time.monotonic(), 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def answered_after(self, moment: float, seconds: float) -> bool:
        """Waits until both questions were asked after this moment, and answered well."""
        deadline = time.monotonic() + seconds
        while {asked.what for asked in self._asked if asked.at > moment and asked.status == 200} != {"/health", "a small chat"}:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def late_since(self, moment: float, most: float) -> list[str]:
        """The worst of each; what was asked shortly before counts as well."""
        worst: dict[str, Asked] = {}
        for asked in self._asked:
            if asked.at + asked.seconds > moment and asked.seconds > worst.get(asked.what, asked).seconds - 1e-9:
                worst[asked.what] = asked
        bad = [asked for asked in worst.values() if asked.seconds > most or asked.status != 200]
        return [f"{asked.what} took {asked.seconds:.1f} s (status {asked.status}), at most {most:.1f} s are allowed" for asked in bad]


@dataclass
class Memory:
    """Bytes of each process of a server: when it was first seen, and at most."""

    pid: int
    names: dict[int, str] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    most: dict[int, int] = field(default_factory=dict)

    def look(self) -> None:
        for pid in family(self.pid):
            with contextlib.suppress(OSError, KeyError):  # it has just ended
                now = memory_of(pid)
                self.names[pid] = name_of(pid)
                self.first.setdefault(pid, now["VmRSS"])
                self.most[pid] = max(self.most.get(pid, 0), now["VmHWM"])

    def grown(self) -> list[str]:
        return [
            f"{self.names[pid]} grew by {(most - self.first[pid]) >> 20} MB"
            for pid, most in self.most.items()
            if most - self.first[pid] > MOST_GROWTH
        ]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Peaks of processes that are there are forgotten first; those that start meanwhile are counted from their start."""
        for pid in family(self.pid):
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        self.first.clear()
        self.most.clear()
        self.look()
        over = threading.Event()
        looking = threading.Thread(target=lambda: _until(over, self.look), daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()
            self.look()


def _until(over: threading.Event, look: Callable[[], None]) -> None:
    while not over.wait(0.05):
        look()


def memory_of(pid: int) -> dict[str, int]:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}


def name_of(pid: int) -> str:
    """What a process of a server does, by how it was started."""
    words = Path(f"/proc/{pid}/cmdline").read_text()
    return next((name for name in ("grammar.child", "engine.process") if name in words), "the API process")


def _ask_for_ever(host: str, port: int, what: str, method: str, path: str, body: bytes | None) -> None:
    while True:
        start, status = time.monotonic(), NO_ANSWER
        try:
            connection = http.client.HTTPConnection(host, port, timeout=60)
            connection.request(method, path, body, {"content-type": "application/json"} if body else {})
            answer = connection.getresponse()
            answer.read()
            status = answer.status
            connection.close()
        except OSError:
            pass
        line = json.dumps({"at": start, "what": what, "seconds": time.monotonic() - start, "status": status}) + "\n"
        os.write(sys.stdout.fileno(), line.encode())  # in one piece: two threads write
        time.sleep(0.05)


if __name__ == "__main__":
    address = sys.argv[1], int(sys.argv[2])
    chat = json.dumps(SMALL).encode()
    threading.Thread(target=_ask_for_ever, args=(*address, "/health", "GET", "/health", None), daemon=True).start()
    _ask_for_ever(*address, "a small chat", "POST", CHAT, chat)
