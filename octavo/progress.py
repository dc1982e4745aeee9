"""Progress of long work on stderr: a bar where rich is installed and a terminal looks on, else a plain line now and then."""

import sys
import time
from types import TracebackType

LINE_EVERY = 5.0  # seconds between plain lines


class GenerateProgress:
    """Requests done, and tokens a second in and out."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._total = total
        self._done = self._tokens_in = self._tokens_out = 0
        self._start = self._last_line = time.perf_counter()
        self._enabled = enabled
        self._bar = _bar(total) if enabled and sys.stderr.isatty() else None

    def __enter__(self) -> "GenerateProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, tokens_in: int, tokens_out: int) -> None:
        """What came on top since the last call."""
        self._done += done
        self._tokens_in += tokens_in
        self._tokens_out += tokens_out
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, rates=self._rates())
        elif self._enabled and time.perf_counter() - self._last_line > LINE_EVERY:
            self._last_line = time.perf_counter()
            print(f"{self._done}/{self._total} requests, {self._rates()}", file=sys.stderr)

    def _rates(self) -> str:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        return f"in {self._tokens_in / seconds:.0f} tok/s, out {self._tokens_out / seconds:.0f} tok/s"


def _bar(total: int):  # type: ignore[no-untyped-def]  # rich may be absent, and so may its types
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = [TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"), TimeRemainingColumn()]
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task("generating", total=total, rates="")
    return bar
