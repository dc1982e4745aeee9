"""For tests: reports what blocks a loop (`OCTAVO_DEBUG=loop.slow=200,step.slow=1000`), with the stack at that moment.

    event loop       a thread asks it for a sign of life, again and again; a turn is what runs before the sign comes
    engine's loop    a turn is one call, with at most one step in it

Turns are measured in CPU time of the loop's own thread, so other work on the machine does not count as a stall. Another thread that
holds the interpreter blocks the loop as well: the thread here then wakes late.
"""

import asyncio
import sys
import threading
import time
import traceback

from octavo.log import logger

LOOK_SECONDS = 0.02
FOR_EVER_SECONDS = 5.0  # a longer turn is reported before it ends
OTHERS = 5  # another thread may hold the interpreter so many times longer: a large body is parsed in one call
SAID = "did not turn for"  # text that tests look for
Stack = list[tuple[str, int, str]]  # file, line, function


class StallWatch:
    """Watches one thread, which must create it."""

    def __init__(self, what: str, milliseconds: int) -> None:
        self._what = what
        self._most = milliseconds / 1000
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._began: float | None = None  # by the clock; None: no turn is watched
        self._stack: Stack = []  # seen in a turn that takes too long
        self._reported = False  # whether the turn was reported
        self._looked = self._times()

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> "StallWatch":
        """`loop`: the event loop whose turns are watched. Without one, `begin` and `end` mark the turns."""
        threading.Thread(target=self._run, args=(loop,), name="stall watch", daemon=True).start()
        return self

    def begin(self) -> None:
        """Records the beginning of a turn."""
        self._stack, self._reported = [], False
        self._began = time.clock_gettime(self._clock)

    def end(self) -> None:
        """Records the end of a turn."""
        began, self._began = self._began, None
        if began is not None and (took := time.clock_gettime(self._clock) - began) > self._most and not self._reported:
            self._report(took, "", _formatted(self._stack) or "(it was over before anybody looked)\n")

    def _run(self, loop: asyncio.AbstractEventLoop | None) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self._look_for_others()
            if (began := self._began) is not None:
                self._look(time.clock_gettime(self._clock) - began)
            elif loop is not None:
                self.begin()
                try:
                    loop.call_soon_threadsafe(self.end)
                except RuntimeError:  # the loop is closed
                    return

    def _look(self, took: float) -> None:
        """Keeps the stack of a turn that takes too long, and reports one that takes very long."""
        if took > self._most:
            self._stack = self._stack or _stack_of(self._thread)
        if took > FOR_EVER_SECONDS and not self._reported:
            self._reported = True
            self._report(took, " and still does not", _formatted(self._stack))

    def _look_for_others(self) -> None:
        """Reports the other threads if this one woke late while they computed: they held the interpreter."""
        before, self._looked = self._looked, self._times()
        wall, loop, process = (now - then for now, then in zip(self._looked, before))
        if min(wall, process - loop) > OTHERS * self._most:
            others = [thread for thread in threading.enumerate() if thread.ident not in (self._thread, threading.get_ident())]
            stacks = "".join(f"  {thread.name}:\n{_formatted(_stack_of(thread.ident))}" for thread in others)
            self._report(min(wall, process - loop), " because another thread had the interpreter", stacks, OTHERS)

    def _times(self) -> tuple[float, float, float]:
        return time.monotonic(), time.clock_gettime(self._clock), time.process_time()

    def _report(self, seconds: float, why: str, stack: str, times: int = 1) -> None:
        took, most = 1000 * seconds, 1000 * self._most * times
        logger.error("%s %s %d ms of CPU time%s, at most %d are allowed\n%s", self._what, SAID, took, why, most, stack)


def _stack_of(thread: int | None) -> Stack:
    """Returns the thread's stack, outermost call first. Source lines are read later: opening a file releases the interpreter, and a busy
    thread may then keep it until its turn is over.
    """
    frame, stack = sys._current_frames().get(thread or 0), []
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return stack[::-1]


def _formatted(stack: Stack) -> str:
    return "".join(traceback.format_list([(*place, None) for place in stack]))
