"""A server under watch: whatever is done to it, six things hold afterwards.

    P1  the next ordinary request returns the same greedy text
    P2  blocks, queue, running set, request table and open answers are back to nothing within a second
    P3  no answer tells of a traceback, a path, an address, a key or a value of the environment
    P4  every answer came within 5 s
    P5  neither process's memory grew by 200 MB at its peak
    P6  a canary that ran at the same time has the same text, and took no longer than twice its time alone, and 50 ms

The canary asks again and again while a row runs; the median of its times counts. A row that was too slow for it is run twice more,
each time against a baseline taken afresh, and the median of the three counts: one busy moment of the machine is no offence.
"""

import os
import re
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.fair_clock import FairClock, Machine
from tests.support.server_process import Reply, ServerProcess

SECRETS = {"OCTAVO_API_KEY": "sk-of-the-environment", "HF_TOKEN": "hf-of-the-environment"}
KEY, OTHER_KEY, ADMIN_KEY = "sk-first-key", "sk-second-key", "sk-admin-key"
CANARY = {"prompt": "The dog was", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
ORDINARY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
HELD = ("answers", "requests", "streams", "running", "waiting", "held_blocks")  # nothing of it when idle
MOST_GROWTH = 200 * 2**20
TELLTALES = re.compile(
    rf'Traceback|0x[0-9a-fA-F]{{6}}|File "|(?<![\w.:/])/(usr|etc|tmp|home|root|proc|var)/|site-packages'
    rf"|{'|'.join(map(re.escape, [KEY, OTHER_KEY, ADMIN_KEY, *SECRETS.values()]))}"
)


class Watched:
    def __init__(self, *flags: str, debug: str = "", env: dict[str, str] | None = None, key: str = "", one_canary: bool = False) -> None:
        """`one_canary`: where steps are slow, and the queue may be full, the one that runs already is not to be disturbed."""
        self.model = flags[0]
        self._machine = Machine([os.getpid()])  # since the row began: what is late for others' work is not late
        self._key = key
        self._one_canary = one_canary
        self.process = ServerProcess(
            "tests.support.watched_server", *flags, env={"HF_TOKEN": SECRETS["HF_TOKEN"], "OCTAVO_DEBUG": debug, **(env or {})}
        )
        self.ask("POST", "/v1/completions", CANARY)  # the first of all warms up
        self._texts = self._text(CANARY), self._text(ORDINARY)
        self._alone = self._baseline()

    def close(self) -> None:
        self.process.__exit__(None, None, None)

    # --- what rows use -----------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: bytes | object = b"", **headers: str) -> Reply:
        """One question and its answer, with P3 and P4."""
        start = time.monotonic()
        given = {"authorization": f"Bearer {self._key}"} if self._key else {}
        return self.seen(self.process.ask(method, path, body, **{**given, **headers}), start)

    def send(self, data: bytes, most: int = 1000) -> list[Reply]:
        start = time.monotonic()
        return [self.seen(reply, start) for reply in self.process.send(data, most=most)]

    def seen(self, reply: Reply, start: float) -> Reply:
        seconds = time.monotonic() - start
        assert seconds < 5 or seconds * self._machine.left() ** 2 < 5, f"P4: {reply}"
        assert not TELLTALES.search(reply.body.decode("utf-8", "replace")), f"P3: {reply}"
        return reply

    def watch(self) -> dict[str, int]:
        found: dict[str, int] = self.process.ask("GET", "/watch").json
        return found

    def wait_until(self, holds: Callable[[dict[str, int]], bool], seconds: float, why: str) -> None:
        clock = FairClock()
        while not holds(found := self.watch()):
            assert not clock.is_past(seconds), f"{why}: {found}"
            time.sleep(0.02)

    def wait_idle(self, seconds: float = 1.0) -> None:
        self.wait_until(lambda found: not any(found[name] for name in HELD), seconds, "P2")

    # --- what holds afterwards ---------------------------------------------------------------------------------------

    def withstand(self, row: Callable[[], None], canary: bool = True) -> None:
        self._machine = Machine([os.getpid()])
        before = self._memory("VmRSS", forget_peaks=True)
        if not canary:
            row()
        elif (first := self._excess(row, self._alone)) > 0:
            excess = statistics.median([first, *(self._excess(row, max(self._alone, self._baseline())) for _ in range(2))])
            assert excess <= 0, f"P6: the canary took {excess:.3f} s more than it may, alone it takes {self._alone:.3f} s"
        self.wait_idle()
        assert self._text(ORDINARY) == self._texts[1], "P1"
        self.wait_idle()  # the ordinary request brought the engine's newest figures
        for name, peak in self._memory("VmHWM").items():
            assert peak - before.get(name, peak) < MOST_GROWTH, f"P5: process {name} grew by {peak - before[name]:,} bytes"

    def _excess(self, row: Callable[[], None], alone: float) -> float:
        """Seconds by which a canary beside the row took longer than it may, by a fair clock."""
        machine, most = Machine([os.getpid()]), 2 * alone + 0.05
        with Canary(self._timed_canary, self._one_canary) as canary:
            row()
        seconds = statistics.median(canary.seconds)
        return (seconds if seconds <= most else seconds * machine.left() ** 2) - most

    def _timed_canary(self) -> float:
        start = time.monotonic()
        assert self._text(CANARY) == self._texts[0], "P6: the canary's text"
        return time.monotonic() - start

    def _baseline(self) -> float:
        return statistics.median(self._timed_canary() for _ in range(3))

    def _text(self, body: dict[str, Any]) -> str:
        reply = self.ask("POST", "/v1/completions", body)
        assert reply.status == 200, reply
        text: str = reply.json["choices"][0]["text"]
        return text

    def _memory(self, line: str, forget_peaks: bool = False) -> dict[int, int]:
        """Bytes of the API process and the engine; an engine that is new since then has no before."""
        found = {}
        for pid in filter(None, (self.process.process.pid, self.watch()["engine_pid"])):
            if forget_peaks:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            status = Path(f"/proc/{pid}/status").read_text()
            found[pid] = 1024 * int(status.partition(f"{line}:")[2].split()[0])
        return found


class Canary:
    """Asks again and again beside what happens in its `with`, once at least; what failed in it is raised at the end."""

    def __init__(self, ask: Callable[[], float], once: bool) -> None:
        self._ask = ask
        self._stop = threading.Event()
        if once:
            self._stop.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._sing)
        self.seconds: list[float] = []

    def _sing(self) -> None:
        try:
            while not (self.seconds and self._stop.is_set()):
                self.seconds.append(self._ask())
        except BaseException as error:
            self._error = error

    def __enter__(self) -> "Canary":
        self._thread.start()
        time.sleep(0.005)  # it is on its way
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and value is None:
            raise self._error
