"""Opens a model for a command. While it loads, a terminal shows one line, which is removed at the end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo.llm import LLM


@contextmanager
def opened(config: EngineConfig) -> Iterator["LLM"]:
    name = "the default model" if config.model is None else Path(config.model).name
    with _status_line(f"loading {name} ..."):
        from octavo.llm import LLM  # torch loads here: the line is there before

        llm = LLM.from_config(config, log_default="WARNING")
    with llm:
        yield llm


@contextmanager
def _status_line(text: str) -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
