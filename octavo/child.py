"""Helps with child processes: starts and restarts them, ends them with their parent, and gives freed memory back to the system."""

import ctypes
import os
import signal
import sys
from contextlib import suppress

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


def give_back_freed_memory() -> None:
    """Gives memory that this process has freed back to the system. malloc would keep much of it."""
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
