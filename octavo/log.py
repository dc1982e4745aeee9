"""Logging: one logger, to stderr, `OCTAVO_LOG_LEVEL` sets how much (DEBUG, INFO, WARNING, ERROR); as text, or an object a line."""

import json
import logging
import sys
import time
from contextvars import ContextVar

logger = logging.getLogger("octavo")
request_id: ContextVar[str] = ContextVar("request_id", default="")  # of what is being worked on, in a server


def setup(level: str, form: str = "text") -> None:
    """Send Octavo's log lines to stderr at `level`. A second call only changes the level."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper())


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(record.created, 3), "level": record.levelname, "message": record.getMessage()}
        if known := request_id.get():
            line["request_id"] = known
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def total(self) -> float:
        return time.perf_counter() - self._start
