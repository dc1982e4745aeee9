"""Shows the progress of long work on stderr. At a terminal it redraws a bar or a line, else it prints a line every few seconds."""

import sys
import time
from types import TracebackType

LINE_EVERY = 5.0  # seconds between plain lines
DOWNLOAD_LINE_EVERY = 10.0
REDRAW_EVERY = 0.2


class GenerateProgress:
    """Shows finished requests, and prompt and output tokens per second."""

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

    def count(self, done: int, tokens_in: int, tokens_out: int) -> None:
        """Adds what is new since the last call."""
        self._done += done
        self._tokens_in += tokens_in
        self._tokens_out += tokens_out

    def show(self) -> None:
        """Shows the progress, if the last time is long enough ago."""
        if not self._enabled or time.perf_counter() - self._last_line < (LINE_EVERY if self._bar is None else REDRAW_EVERY):
            return
        self._last_line = time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, rates=self._rates())
        else:
            print(f"{self._done}/{self._total} requests, {self._rates()}", file=sys.stderr)

    def _rates(self) -> str:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        return f"in {self._tokens_in / seconds:.0f} tok/s, out {self._tokens_out / seconds:.0f} tok/s"


def _bar(total: int):  # type: ignore[no-untyped-def]  # rich and its types may not be installed
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = [TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"), TimeRemainingColumn()]
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task("generating", total=total, rates="")
    return bar


def in_units(num_bytes: float) -> str:
    """Returns a number of bytes as text, such as 94 MB or 2.3 GB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{1 if num_bytes < 10 * size else 0}f} {unit}"
    return f"{num_bytes / 1000:.0f} kB"


class DownloadProgress:
    """Shows how much of a download is here, how fast it is, and how long the rest will take."""

    def __init__(self, name: str, total: int, enabled: bool = True) -> None:
        self._name = name
        self._total = total
        self._done = self._came = 0  # bytes that are here; those of them that this run downloaded
        self._start = self._last_line = time.perf_counter()
        self._enabled = enabled
        self._at_terminal = sys.stderr.isatty()

    def __enter__(self) -> "DownloadProgress":
        self._show(f"downloading {self._name}, {in_units(self._total)}")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._at_terminal:
            self._show("")
        elif kind is None:
            self._show(f"downloaded {self._name} in {time.perf_counter() - self._start:.0f} s")

    def skip(self, num_bytes: int) -> None:
        """Adds bytes of an earlier download. A negative number takes bytes away that must be downloaded again."""
        self._done += num_bytes

    def update(self, num_bytes: int) -> None:
        """Adds bytes that were downloaded just now, and shows the progress now and then."""
        self._done += num_bytes
        self._came += num_bytes
        now = time.perf_counter()
        if now - self._last_line > (REDRAW_EVERY if self._at_terminal else DOWNLOAD_LINE_EVERY):
            self._last_line = now
            rate = max(self._came / (now - self._start), 1.0)
            left = _duration(max(self._total - self._done, 0) / rate)
            percent = 100 * self._done // max(self._total, 1)
            self._show(f"downloading {self._name}, {percent} % of {in_units(self._total)}, {in_units(rate)}/s, {left} left")

    def _show(self, text: str) -> None:
        if self._enabled:
            print(f"\r\033[K{text}" if self._at_terminal else text, end="" if self._at_terminal else "\n", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    """Returns a duration as text, such as 45 s, 12 min or 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
