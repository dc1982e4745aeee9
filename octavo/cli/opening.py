"""Opens what a command works with: a model in this process, or the connection to a running server."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.client.api import RemoteServer
from octavo.client.http import parse_url
from octavo.config import EngineConfig, api_key

if TYPE_CHECKING:
    from octavo.llm import LLM


@contextmanager
def opened(config: EngineConfig) -> Iterator["LLM"]:
    """Gives an open model, and closes it at the end. While the model loads, a terminal shows that in one line, which then disappears."""
    name = "the default model" if config.model is None else Path(config.model).name
    with _status_line(f"loading {name} ..."):
        from octavo.llm import LLM  # after the line is shown: torch takes seconds to load

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


def add_remote_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    text = "use this running server, Octavo's or another with OpenAI's API: http://127.0.0.1:8000"
    parser.add_argument("--url", metavar="URL", required=required, help=text)
    add_key_flag(parser)


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: OCTAVO_API_KEY)")


@contextmanager
def open_remote(args: argparse.Namespace) -> Iterator[RemoteServer]:
    """Gives the server at --url, and closes the connections to it at the end."""
    server = RemoteServer(parse_url(args.url), args.api_key or api_key())
    try:
        yield server
    finally:
        server.close()
