"""A storm of heavy requests on a server, and what it does to everybody else; each kind of request is judged by itself.

    /health and a small chat    asked again and again by another process, each is answered within a second of what the machine has left
    loops                       no turn of the event loop takes more than 200 ms of CPU time, no turn of the engine's more than a second
    memory                      no process of the server grows by more than 300 MB, and at the end they give it back

`python -m tests.support.heavy_storm HOST PORT` is the process that asks. What was late is done twice more: only what is late every time
counts, for one busy moment of the machine is no offence.
"""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from octavo.engine.stall_watch import SAID
from tests.cli.processes import ROOT, environment
from tests.support.heavy_requests import CHAT, DIGITS, MESSAGES, TEXTS, Heavy, Place, Shape, Taken, all_at_once, long_texts, times
from tests.support.server_process import ServerProcess

LATE_SECONDS = 1.0
MOST_GROWTH = 300 * 2**20
SMALL = {"messages": MESSAGES, "max_tokens": 2, "priority": 0}
STALL = re.compile(rf"(the .* {SAID} \d+ ms of CPU time[^\n]*)\n((?:  .*\n)*)")
NO_ANSWER = 0
Multiples = tuple[tuple[int, int], ...]  # of prompts and samples


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
        command = [sys.executable, "-m", "tests.support.heavy_storm", server.host, str(server.port)]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment({}), stdout=subprocess.PIPE, text=True)
        self._asked: list[Asked] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._asked.append(Asked(**json.loads(line)))

    def __enter__(self) -> "Asker":
        self.answered_after(time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def answered_after(self, moment: float, seconds: float = 60.0) -> None:
        """Waits until both questions were asked after this moment, and answered well."""
        deadline = time.monotonic() + seconds
        while {asked.what for asked in self._asked if asked.at > moment and asked.status == 200} != {"/health", "a small chat"}:
            assert time.monotonic() < deadline, f"no answer for {seconds:g} s: {self._asked[-3:]}"
            time.sleep(0.01)

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
        for pid in _family(self.pid):
            with contextlib.suppress(OSError, KeyError):  # it has just ended
                now = _status(pid)
                self.names.setdefault(pid, _name(pid))
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
        for pid in _family(self.pid):
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


class Machine:
    """What other programs left of the machine: who shares its cores with them is slower, and not to blame."""

    def __init__(self, ours: Iterable[int]) -> None:
        self._ours = list(ours)
        self._start = self._now()

    def _now(self) -> tuple[float, float]:
        """CPU seconds of all, and of our own processes with the children they have outlived."""
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().split()[1:11])
        ours = 0
        for pid in {other for one in self._ours for other in _family(one)}:
            with contextlib.suppress(OSError):
                ours += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        return (user + nice + system + sum(rest[:3])) / ticks, ours / ticks

    def left(self, seconds: float) -> float:
        """The share that was not taken by others in these seconds since it was made."""
        everybody, ours = (now - then for now, then in zip(self._now(), self._start))
        return min(1.0, max(0.1, 1 - (everybody - ours) / (seconds * (os.cpu_count() or 1))))


def _until(over: threading.Event, look: Callable[[], None]) -> None:
    while not over.wait(0.05):
        look()


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has just ended
                found += map(int, task.read_text().split())
    return found


def _status(pid: int) -> dict[str, int]:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}


def _name(pid: int) -> str:
    """What a process of a server does, by how it was started."""
    words = Path(f"/proc/{pid}/cmdline").read_text()
    return next((name for name in ("grammar_child", "engine.process") if name in words), "the API process")


@dataclass
class Storm:
    server: ServerProcess
    asker: Asker
    full: int  # bytes of the largest bodies
    patience: float  # seconds after which an answer to a heavy request is no longer waited for
    log: Callable[[str], None] = lambda line: None
    offences: dict[str, list[str]] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)  # the largest values that were

    def judge(self, name: str, storm: Callable[[], object]) -> None:
        """Runs it, and notes what it did to others; again if they were only late."""
        for _ in range(3):
            start, read = time.monotonic(), len(self.server.stderr)
            memory, machine = Memory(self.server.process.pid), Machine([os.getpid()])
            with memory.watched():
                storm()
                self.asker.answered_after(time.monotonic())
            worse = [f"{found[1]} in {_place(found[2])}" for found in STALL.finditer(self.server.stderr[read:])] + memory.grown()
            late = self.asker.late_since(start, LATE_SECONDS / machine.left(time.monotonic() - start))
            self.log(f"{time.monotonic() - start:6.2f} s  {name}  {worse + late}")
            if worse or not late:
                break
        if worse + late:
            self.offences[name] = worse + late

    def send(self, requests: Iterable[Heavy]) -> list[int]:
        """All at once; the status of each answer."""
        requests = list(requests)
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda heavy: ask_heavily(self.server, heavy, self.patience), requests))

    def try_place(self, place: Place, multiples: Multiples) -> None:
        """Every shape at what fills a body and at the most that is taken, and that once more times prompts and samples."""
        for shape in place.shapes:
            size = self._largest(place, shape)
            if size and shape is TEXTS and (longest := self._largest(place, long := long_texts(size))):
                shape, size = long, longest
            if size:
                self.taken.append(Taken(place, shape, size))
        found = [taken for taken in self.taken if taken.place is place and taken.shape is not DIGITS]
        if found and place.generates_many:
            largest = max(found, key=lambda taken: taken.size)
            for prompts, n in multiples:
                self.send([times(largest, prompts, n)])

    def try_all_at_once(self, multiples: Multiples) -> None:
        """Every field of completions at its largest, in one request."""
        self.send([all_at_once(self.taken, self.full, prompts, n) for prompts, n in multiples])

    def _largest(self, place: Place, shape: Shape) -> int:
        """Bytes of the largest value of this shape that is taken, to a factor of two; 0: none is."""
        refused, taken = 0, self.full.bit_length() - 1  # halvings of a full body

        def is_taken(halvings: int) -> bool:
            return self.send([place.heavy(shape, self.full >> halvings)]) == [200]

        if is_taken(refused):
            return self.full
        if not is_taken(taken):
            return 0
        while taken - refused > 1:
            middle = (refused + taken) // 2
            refused, taken = (refused, middle) if is_taken(middle) else (middle, taken)
        return self.full >> taken

    def check(self) -> None:
        said = "\n".join(f"{name}: {'; '.join(found)}" for name, found in self.offences.items())
        assert not self.offences, f"heavy requests that others had to suffer for:\n{said}"


def ask_heavily(server: ServerProcess, heavy: Heavy, patience: float) -> int:
    """The status of the answer, which is read to its end, unless nobody wants to or it takes too long."""
    deadline = time.monotonic() + patience
    connection = http.client.HTTPConnection(server.host, server.port, timeout=patience)
    try:
        with contextlib.suppress(ConnectionError):  # it has heard enough, and said so
            connection.request("POST", heavy.path, heavy.body, {"content-type": "application/json"})
        if not heavy.reads:
            time.sleep(patience)
            return NO_ANSWER
        answer = connection.getresponse()
        while time.monotonic() < deadline and answer.read(2**20):
            pass
        return answer.status
    except (TimeoutError, ConnectionError, http.client.HTTPException):
        return NO_ANSWER
    finally:
        with contextlib.suppress(OSError):
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()


def _place(stack: str) -> str:
    """The innermost lines of ours in a stack."""
    found = re.findall(r'File "[^"]*/(octavo/[^"]+)", line (\d+), in (\S+)', stack)
    return " < ".join(f"{file}:{line} {name}" for file, line, name in reversed(found[-3:])) or "(nobody knows where)"


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
