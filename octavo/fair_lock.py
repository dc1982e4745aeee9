"""`FairLock` lets threads take turns at something that only one of them may use at a time."""

import threading
from types import TracebackType

from octavo.errors import EngineError


class FairLock:
    """A lock that a thread cannot take twice in a row while another thread waits for it. With a plain lock it could."""

    def __init__(self) -> None:
        self._next = threading.Lock()  # the thread that has it gets the next turn
        self._turn = threading.Lock()
        self._holder: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the lock. Then the caller is a signal handler or a finalizer, which Python may run at any point."""
        return self._holder == threading.get_ident()

    def __enter__(self) -> None:
        if self.is_mine:
            raise EngineError("this thread is in the middle of a step: a signal handler or a finalizer cannot start another one")
        with self._next:
            self._turn.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._holder = None
        self._turn.release()
