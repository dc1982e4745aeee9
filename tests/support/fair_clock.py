"""How long something took, on a machine that other programs use as well. Only tests marked `timed` ask it.

    clock = FairClock()
    ...
    assert clock.seconds() < 1  # of a machine that has nothing else to do

A busy machine stretches a bound at most 4-fold.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

LEAST_SHARE = 0.5  # of the machine that is left to us: its square stretches a bound 4-fold
TICKS = os.sysconf("SC_CLK_TCK")  # of a second, in which the kernel counts CPU time


class Machine:
    """What other programs left of the machine: who shares its cores with them is slower, and not to blame."""

    def __init__(self, ours: Iterable[int]) -> None:
        self._ours = list(ours)
        self._start, self._began = self._now(), time.monotonic()

    def _now(self) -> tuple[float, float]:
        """CPU seconds of all, and of our own processes with the children they have outlived."""
        user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().split()[1:11])
        ours = 0.0
        for pid in {other for one in self._ours for other in family(one)}:
            with contextlib.suppress(OSError):
                ours += cpu_seconds(pid)
        return (user + nice + system + sum(rest[:3])) / TICKS, ours

    def left(self) -> float:
        """The share that was not taken by others since it was made; never less than half, since callers square it."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        everybody, ours = (now - then for now, then in zip(self._now(), self._start))
        return min(1.0, max(LEAST_SHARE, 1 - (everybody - ours) / (seconds * (os.cpu_count() or 1))))


class FairClock:
    """Counts from when it was made. A question waits for its turn in a server and in its engine: the share counts with its square."""

    def __init__(self) -> None:
        self._machine = Machine([os.getpid()])
        self._start = time.monotonic()

    def seconds(self) -> float:
        return (time.monotonic() - self._start) * self._machine.left() ** 2

    def is_past(self, seconds: float) -> bool:
        """For loops: the share of the machine is read only once the bound has passed."""
        return time.monotonic() - self._start > seconds and self.seconds() > seconds


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process with the children it has outlived."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])) / TICKS


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):  # it, or a thread of it, has just ended
            for task in Path(f"/proc/{one}/task").glob("*/children"):
                found += map(int, task.read_text().split())
    return found
