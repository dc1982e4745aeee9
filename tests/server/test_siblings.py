"""Further API processes as their parent sees them: who dies, hangs or is stopped is started again, but not for ever in one minute.

Each is played by a process that takes its spawn and beats, and nothing else.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from octavo import child
from octavo.config import EngineConfig
from octavo.server import siblings
from octavo.server.metrics import Numbers, shared_file
from octavo.server.siblings import Siblings, SpawnConfig
from octavo.server_config import ServerConfig

TICK = 0.01
PLAYED = """
import json, mmap, os, sys, time
spawn, parent = json.loads(sys.stdin.readline()), os.getppid()
cells = memoryview(mmap.mmap(spawn["shared"], 0)).cast("d")
beats, then = spawn["model_name"].split()
beats = int(beats)
while os.getppid() == parent:
    if beats:
        beats -= 1
        cells[-1] += 1
    if then == "works":
        worked = time.process_time() + 0.05
        while time.process_time() < worked:
            pass
    elif beats or then == "hangs":
        time.sleep(0.01)
"""  # without imports of ours, so that it starts at once: the last cell of the last row is the one to beat


class Parent:
    def __init__(self, beats: int, then: str, max_restarts: int) -> None:
        """A sibling beats so often, and then hangs or spins. One that works takes CPU time for every beat."""
        config = ServerConfig(api_processes=2, max_restarts=max_restarts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        numbers = Numbers(shared_file(), 0, 2)
        self.siblings = Siblings(SpawnConfig(EngineConfig(), config, "", f"{beats} {then}"), self._listener, numbers)
        (self.sibling,) = self.siblings._all

    @property
    def pid(self) -> int | None:
        return None if self.sibling._process is None else self.sibling._process.pid

    def until(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        """Ticks meanwhile."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "it did not happen in time"
            assert self.siblings.check()
            time.sleep(TICK)

    def until_ready(self) -> int:
        self.until(lambda: self.pid is not None and self.sibling._ready_at is not None)
        assert self.pid is not None
        return self.pid


@contextmanager
def parent(beats: int = 10**9, then: str = "hangs", max_restarts: int = 3) -> Iterator[Parent]:
    started = Parent(beats, then, max_restarts)
    try:
        yield started
    finally:
        started.siblings.pass_on(again=True)
        started.sibling.wait()
        started._listener.close()


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "command", lambda *words: [sys.executable, "-c", PLAYED])
    monkeypatch.setattr(child, "FIRST_PAUSE", 0.01)


def test_one_that_dies_now_and_then_is_always_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "HEALTHY_SECONDS", 0.0)
    with parent(max_restarts=1) as first:
        pids = {first.until_ready()}
        for _ in range(3):
            first.sibling.send(signal.SIGKILL)
            first.until(lambda: first.pid not in pids)
            pids.add(first.until_ready())
        assert len(pids) == 4


def test_one_that_dies_again_and_again_is_given_up() -> None:
    with parent(max_restarts=1) as first:
        before = first.until_ready()
        first.sibling.send(signal.SIGKILL)
        first.until(lambda: first.pid not in (None, before))
        first.sibling.send(signal.SIGKILL)
        first.sibling.wait()
        assert not first.siblings.check()


@pytest.mark.parametrize("how", ["hangs", "spins", "is stopped"])
def test_one_that_does_nothing_is_killed_and_started_again(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how != "is stopped":
        monkeypatch.setattr(siblings, "SILENT_TICKS", 50)
    with parent(*((3, how) if how != "is stopped" else ())) as first:
        before = first.until_ready()
        if how == "is stopped":
            first.sibling.send(signal.SIGSTOP)
        first.until(lambda: first.pid not in (None, before))
        assert first.until_ready() != before
    said = "it was stopped" if how == "is stopped" else "it gave no sign of life"
    assert any(f"API process {before} is killed: {said}" in line for line in caplog.messages)


@contextmanager
def busy_cpu(pid: int) -> Iterator[None]:
    """Leaves a process next to nothing of one CPU."""
    cpu = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(pid, cpu)
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    spin = f"import os; os.sched_setaffinity(0, {cpu})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(6)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(pid, os.sched_getaffinity(0))  # whoever has no CPU cannot die, either


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell who waits for a CPU")
def test_one_that_gets_no_cpu_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "SILENT_TICKS", 50)
    with parent(then="works") as first:
        before, silent = first.until_ready(), 0
        with busy_cpu(before):
            deadline = time.monotonic() + 60
            while silent < 100:
                assert time.monotonic() < deadline, "it was never silent for long enough"
                beats = first.sibling._beats
                assert first.siblings.check() and not first.sibling._killed
                silent = silent + 1 if first.sibling._beats == beats else 0
                time.sleep(TICK)


def test_one_that_slept_with_the_whole_machine_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with parent() as first:
        before, clock = first.until_ready(), time.monotonic
        monkeypatch.setattr(siblings.time, "monotonic", lambda: clock() + 3600)  # nobody ticked and nobody beat in that hour
        for _ in range(20):
            assert first.siblings.check()
            time.sleep(TICK)
        assert first.pid == before


def test_one_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "command", lambda *words: ["/no/such/program"])
    with parent(max_restarts=2) as first:
        deadline = time.monotonic() + 60
        while first.siblings.check():
            assert time.monotonic() < deadline and not isinstance(first.pid, int)
            time.sleep(TICK)
        assert first.sibling._restarts.count == 2


def test_the_pause_before_a_start_grows_and_a_healthy_minute_clears_the_count() -> None:
    restarts = child.Restarts(8)
    assert [restarts.pause(59.9) for _ in range(9)] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, None]
    assert restarts.pause(60.0) == 0.01 and restarts.count == 1
    assert child.Restarts(1000).pause(0.0) == 0.01 and child.Restarts(0).pause(1000.0) is None
