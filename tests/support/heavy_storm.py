"""A storm of heavy requests on a server, and what it does to everybody else; each kind of request is judged by itself.

    /health and a small chat    asked again and again by another process, each is answered within a second of what the machine has left
    loops                       no turn of the event loop takes more than 200 ms of CPU time, no turn of the engine's more than a second
    answers                     none is a failure of the server (500)
    memory                      no process of the server grows by more than 300 MB, and at the end they give it back

What was late is done twice more: only what is late every time counts, for one busy moment of the machine is no offence.
"""

import contextlib
import http.client
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from octavo.engine.stall_watch import SAID
from tests.support.fair_clock import Machine, family
from tests.support.heavy_requests import (
    ANSWERS,
    DIGITS,
    HARD_FORMS,
    TEXTS,
    Heavy,
    Multiples,
    Place,
    Shape,
    Taken,
    all_at_once,
    hard_form,
    large_answers,
    long_texts,
    places,
    times,
)  # fmt: skip
from tests.support.heavy_watch import NO_ANSWER, Asker, Memory, memory_of, name_of
from tests.support.server_process import ServerProcess

LATE_SECONDS = 1.0
BACK_SECONDS = 15  # after which a server is given up
MOST_KEPT = 150 * 2**20  # Python gives back only what is free as a whole
STALL = re.compile(rf"(the .* {SAID} \d+ ms of CPU time[^\n]*)\n((?:  .*\n)*)")
FRAME = re.compile(r'File "[^"]*/(octavo/[^"]+)", line (\d+),? in (\S+)')
FLAGS = ("--scheduling-policy", "priority", "--max-model-len", "512")


class Storm:
    def __init__(self, model: str | None, full: int, patience: float, shapes: int = 99, kept: int = MOST_KEPT) -> None:
        """`model`: None for the default one's vocabulary without its weights. `full`: bytes of the largest bodies.

        `patience`: seconds an answer is waited for. `shapes`: of values tried at each place. `kept`: bytes that a process may keep.
        """
        self._model = model
        self._full = full
        self._patience = patience
        self._shapes = shapes
        self._most_kept = kept
        self._taken: list[Taken] = []  # the largest values that were
        self._offences: dict[str, list[str]] = {}
        self._statuses = Counter[int]()
        self.log: list[str] = []

    def __enter__(self) -> "Storm":
        env = {"OCTAVO_LOG_LEVEL": "ERROR", "PYTHONFAULTHANDLER": "1", "OCTAVO_DEBUG": "" if self._model else "runner=fake"}
        self.server = ServerProcess("octavo serve", *filter(None, [self._model]), *FLAGS, env=env)
        self._asker = Asker(self.server).__enter__()
        self._resting = {pid: memory_of(pid)["VmRSS"] for pid in family(self.server.process.pid)}
        return self

    def __exit__(self, *why: object) -> None:
        self._asker.__exit__()
        with contextlib.suppress(AssertionError):  # stalls are judged here
            self.server.__exit__(None, None, None)

    def judge(self, name: str, storm: Callable[[], object]) -> None:
        """Runs it, and notes what it did to others; again if they were only late. A server that does not come back is replaced."""
        for _ in range(3):
            start, read = time.monotonic(), len(self.server.stderr)
            self._statuses = Counter[int]()
            memory, machine = Memory(self.server.process.pid), Machine([os.getpid()])
            with memory.watched():
                storm()
                back = self._asker.answered_after(time.monotonic(), BACK_SECONDS)
            worse = [] if back else [f"nobody was answered for {BACK_SECONDS} s afterwards, busy in {self._last_words()}"]
            worse += [f"an answer was 500: {self.server.stderr.splitlines()[-1]}"] if self._statuses[500] else []
            worse += [f"{found[1]} in {_place(found[2])}" for found in STALL.finditer(self.server.stderr[read:])] + memory.grown()
            late = self._asker.late_since(start, LATE_SECONDS / machine.left() ** 2)
            self.log.append(f"{time.monotonic() - start:6.2f} s  {name} {dict(self._statuses)}: {'; '.join(worse + late) or 'well'}")
            if not back:
                self.__exit__()
                self.__enter__()
            if worse or not late:
                break
        if worse + late:
            self._offences[name] = worse + late

    def _last_words(self) -> str:
        """Where an API process that says nothing any more is, by its own account: it has no need of the interpreter for that."""
        self.server.process.send_signal(signal.SIGABRT)
        self.server.ended()
        found = FRAME.findall(self.server.stderr.partition("Current thread")[2])
        return " < ".join(f"{file}:{line} {name}" for file, line, name in found[:3])

    def try_fields(self, multiples: Multiples, once: bool = False) -> None:
        """Every field of every route by itself, then those of completions in one request. `once`: of fields with one name the first."""
        found = [one for one in places(self.server.ask("GET", "/openapi.json").json) if one.shapes]
        for place in {one.field: one for one in reversed(found)}.values() if once else found:
            self.judge(f"{place.path} {place.field}", partial(self._try_place, place, multiples))
        for prompts, n in multiples:
            name = f"all fields at once, {prompts} prompts of {n} samples"
            self.judge(name, partial(self._send_largest, partial(all_at_once, self._taken, self._full, prompts, n)))

    def try_forms(self, names: Iterable[str], multiples: Multiples) -> None:
        for name in names:
            self.judge(name, partial(self.send, hard_form(name, multiples)))

    def try_answers(self, names: Iterable[str], tokens: int, streams: int) -> None:
        for name in names:
            self.judge(name, partial(self.send, large_answers(tokens, streams)[name]))

    def try_mixed(self, clients: int, seconds: float) -> None:
        """Whatever was taken, and what is hard or large, from many clients at once."""
        requests = [taken.place.heavy(taken.shape, taken.size) for taken in self._taken]
        requests += [heavy for name in HARD_FORMS for heavy in hard_form(name, ((1, 16),))]
        requests += [heavy for name in ANSWERS for heavy in large_answers(tokens=32, streams=1)[name]]
        rng = random.Random(7)

        def storm() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self.send(rng.choices(requests, k=clients))

        self.judge("all of it, mixed", storm)

    def check(self) -> None:
        """Nobody had to suffer, and what a server took for heavy requests it has given back."""
        if kept := self._kept():
            self._offences["afterwards"] = kept
        said = "\n".join(f"{name}: {'; '.join(found)}" for name, found in self._offences.items())
        assert not self._offences, f"others had to suffer for heavy requests:\n{said}\nall of them:\n" + "\n".join(self.log)

    def _kept(self) -> list[str]:
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            alive = [pid for pid in family(self.server.process.pid) if pid in self._resting]
            more = {pid: memory_of(pid)["VmRSS"] - self._resting[pid] for pid in alive}
            found = [f"{name_of(pid)} keeps {more[pid] >> 20} MB" for pid in more if more[pid] > self._most_kept]
            if not found or time.monotonic() > deadline:
                self.log.append(f"kept afterwards: {', '.join(f'{name_of(pid)} {more[pid] >> 20} MB' for pid in more)}")
                return found
            time.sleep(0.1)

    def send(self, requests: Iterable[Heavy]) -> list[int]:
        """All at once; the status of each answer."""
        requests = list(requests)
        with ThreadPoolExecutor(len(requests)) as pool:
            found = list(pool.map(lambda heavy: _ask_heavily(self.server, heavy, self._patience), requests))
        self._statuses.update(found)
        return found

    def _try_place(self, place: Place, multiples: Multiples) -> None:
        """Every shape at what fills a body and at the most that is taken, and that once more times prompts and samples."""
        for shape in place.shapes[: self._shapes]:
            size = self._largest(place, shape)
            if size and shape is TEXTS and (longest := self._largest(place, long := long_texts(size))):
                shape, size = long, longest
            if size:
                self._taken.append(Taken(place, shape, size))
        found = [taken for taken in self._taken if taken.place is place and taken.shape is not DIGITS]
        if found and place.generates_many:
            largest = max(found, key=lambda taken: taken.size)
            for prompts, n in multiples:
                self._send_largest(partial(times, largest, prompts, n))

    def _send_largest(self, make: Callable[[int], Heavy]) -> None:
        """Halved until it is taken: what is allowed alone may be too much in all."""
        for halvings in range(self._full.bit_length()):
            if self.send([make(halvings)]) != [400]:
                return

    def _largest(self, place: Place, shape: Shape) -> int:
        """Bytes of the largest value of this shape that is taken, to a factor of two; 0: none is."""
        refused, taken = 0, self._full.bit_length() - 1  # halvings of a full body

        def is_taken(halvings: int) -> bool:
            return self.send([place.heavy(shape, self._full >> halvings)]) == [200]

        if is_taken(refused):
            return self._full
        if not is_taken(taken):
            return 0
        while taken - refused > 1:
            middle = (refused + taken) // 2
            refused, taken = (refused, middle) if is_taken(middle) else (middle, taken)
        return self._full >> taken


def _ask_heavily(server: ServerProcess, heavy: Heavy, patience: float) -> int:
    """The status of the answer, which is read to its end, unless nobody wants to or it takes too long."""
    deadline, status = time.monotonic() + patience, NO_ANSWER
    connection = http.client.HTTPConnection(server.host, server.port, timeout=patience)
    try:
        with contextlib.suppress(ConnectionError):  # it has heard enough, and said so
            connection.request("POST", heavy.path, heavy.body, {"content-type": "application/json"})
        if not heavy.reads:
            time.sleep(patience)
            return NO_ANSWER
        answer = connection.getresponse()
        status = answer.status
        while time.monotonic() < deadline and answer.read(2**16):
            pass
    except (TimeoutError, ConnectionError, http.client.HTTPException):
        pass
    finally:
        with contextlib.suppress(OSError):
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    return status


def _place(stack: str) -> str:
    """The innermost lines of ours in a stack."""
    found = FRAME.findall(stack)
    return " < ".join(f"{file}:{line} {name}" for file, line, name in reversed(found[-3:])) or "(nobody knows where)"
