"""Processes of our own: how one is started and how often again, that none outlives its parent, and that freed memory goes back."""

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
    """Calls the function with the number, in another interpreter; modules are those of this one, whatever the folder."""
    return [sys.executable, "-P", "-c", _PROGRAM.format(module, function), str(number), *sys.path]


def die_with(parent: int) -> None:
    """Of all ways in which a parent can end, the system knows. To be called by the child."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """By SIGSTOP: it lives, and does nothing. To be called by its parent."""
    if not hasattr(os, "waitid"):
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def give_back_freed_memory() -> None:
    """Gives the memory that this process has freed back to the system: malloc would keep much of it for later."""
    with suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


class Restarts:
    """How often a process that ended is started again, and how soon: after 0.5 s, 1 s, 2 s ... 30 s.

    The count begins anew after a minute of health, so that a process may die now and then for ever.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0

    def pause(self, healthy_seconds: float) -> float | None:
        """Seconds until the next start; None: there is none. `healthy_seconds`: how long the process was ready before it ended."""
        if healthy_seconds >= HEALTHY_SECONDS:
            self.count = 0
        if self.count >= self.most:
            return None
        self.count += 1
        return min(FIRST_PAUSE * 2.0 ** (self.count - 1), LONGEST_PAUSE)
