"""Logging: one logger, to stderr, `OCTAVO_LOG_LEVEL` sets how much (DEBUG, INFO, WARNING, ERROR)."""

import logging
import sys
import time

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
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def total(self) -> float:
        return time.perf_counter() - self._start
