"""`DeferredInterrupt` delays Ctrl-C until the current step has ended. Half a step would leave the engine in a wrong state."""

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """A context in which Ctrl-C waits for `check` or the end of the context. A second Ctrl-C does not wait.

    It works in the main thread, and only if Python's own handler of Ctrl-C is installed. Elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._installed = False

    def __enter__(self) -> "DeferredInterrupt":
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
