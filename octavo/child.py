"""Processes of our own: how one is started, and that none outlives its parent, however that one ends."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
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
