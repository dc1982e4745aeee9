"""The one logger, which writes to stderr, as text or as JSON lines. `OCTAVO_LOG_LEVEL` is DEBUG, INFO, WARNING or ERROR."""

import json
import logging
import sys
import time
from contextvars import ContextVar

logger = logging.getLogger("octavo")
request_id: ContextVar[str] = ContextVar("request_id", default="")  # the request that a server is working on


def setup(level: str, form: str = "text", engine: int | None = None) -> None:
    """Sends log lines of at least this level to stderr. A second call only changes the level. `engine`: which of several writes them"""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        prefix = "" if engine is None else f"engine {engine}: "
        text = logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s", "%H:%M:%S")
        handler.setFormatter(JsonLines(engine) if form == "json" else text)
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper())


def form() -> str:
    """Returns the form of log lines, for a process that is to write the same."""
    return "json" if any(isinstance(handler.formatter, JsonLines) for handler in logger.handlers) else "text"


class JsonLines(logging.Formatter):
    """Formats a log line as a JSON object."""

    def __init__(self, engine: int | None = None) -> None:
        super().__init__()
        self._engine = {} if engine is None else {"engine": engine}

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(record.created, 3), "level": record.levelname, **self._engine, "message": record.getMessage()}
        if known := request_id.get():
            line["request_id"] = known
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Stopwatch:
    """Counts the seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def total(self) -> float:
        return time.perf_counter() - self._start
