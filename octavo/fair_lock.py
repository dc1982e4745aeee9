"""`FairLock`: how threads share what only one of them may use at a time, and each only for a moment."""

import threading
from types import TracebackType

from octavo.errors import EngineError


class FairLock:
    """A lock that does not come back to the thread that just had it while another one waits, as a plain lock would."""

    def __init__(self) -> None:
        self._next = threading.Lock()  # whoever has it gets the next turn
        self._turn = threading.Lock()
        self._holder: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this thread is inside a turn: what asks is a signal handler or a finalizer, which Python runs anywhere."""
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
