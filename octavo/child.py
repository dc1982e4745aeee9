"""Helps with child processes: starts, watches and restarts them, ends them with their parent, and returns freed memory."""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
HEALTHY_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from {} import {} as main; main(int(sys.argv[1]))"


def command(module: str, function: str, number: int) -> list[str]:
    """Returns a command that calls the function with the number in a new interpreter, with the module path of this one."""
    return [sys.executable, "-P", "-c", _PROGRAM.format(module, function), str(number), *sys.path]


def die_with(parent: int) -> None:
    """Makes the system kill this process when its parent ends, however that happens. The child calls it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def how_ended(code: int) -> str:
    """Returns how a process ended, by its exit code as Python tells it."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def is_stopped(pid: int) -> bool:
    """Whether a child process is stopped by SIGSTOP: alive, but not running. Its parent calls it."""
    if not hasattr(os, "waitid"):
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def is_stopped_here(pid: int) -> bool:
    """Whether any process of this host is stopped by SIGSTOP. False if the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:
        return False


class CpuWait:
    """Detects that a process wants to run and gets no CPU. Then it is silent because the machine is busy, not because it hangs."""

    def __init__(self, pid: int) -> None:
        self._main_thread = Path(f"/proc/{pid}/task/{pid}/stat")
        self._used = ""  # CPU time at the last look

    def lasts(self) -> bool:
        """Returns whether the main thread has had no CPU since the last look and waits for one now. False if the system does not say."""
        try:
            state, *numbers = self._main_thread.read_text().rpartition(") ")[2].split()
        except OSError:
            return False
        before, self._used = self._used, " ".join(numbers[10:12])  # of programs, and of the kernel for them
        return state == "R" and self._used == before


def give_back_freed_memory() -> None:
    """Returns memory that this process has freed to the system. malloc would keep much of it."""
    with suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


class Restarts:
    """Decides whether a process that ended is started again, and how soon: after 0.5 s, 1 s, 2 s ... 30 s.

    A process that was ready for a minute resets the count, so one that dies now and then is always restarted.
    """

    def __init__(self, most: int, grows: bool = True) -> None:
        """`grows`: each pause is longer than the one before; else all are as short as the first"""
        self.most = most
        self._grows = grows
        self.count = 0

    def pause(self, healthy_seconds: float) -> float | None:
        """Returns the seconds until the next start, or None for no more. `healthy_seconds`: how long the process had been ready."""
        if healthy_seconds >= HEALTHY_SECONDS:
            self.count = 0
        if self.count >= self.most:
            return None
        self.count += 1
        return min(FIRST_PAUSE * 2.0 ** (self.count - 1), LONGEST_PAUSE) if self._grows else FIRST_PAUSE
