"""Logging: one logger, to stderr, `OCTAVO_LOG_LEVEL` sets how much (DEBUG, INFO, WARNING, ERROR)."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("octavo")


def setup(level: str) -> None:
    """Send Octavo's log lines to stderr at `level`. A second call only changes the level."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper())


class Stopwatch:
    """Seconds since it was made, or since `lap` was last called."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()

    def total(self) -> float:
        return time.perf_counter() - self._start

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        return seconds


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log how long a start-up phase took."""
    watch = Stopwatch()
    yield
    logger.info("%s took %.2f seconds", name, watch.total())
