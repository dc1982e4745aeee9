"""Ctrl-C between steps, never inside one: a step that is cut in half would leave the engine in no state at all."""

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """While entered (in the main thread, with Python's own handler), Ctrl-C waits for `check` or the end; a second one does not."""

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
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
