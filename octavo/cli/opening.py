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


DEFAULT_URL = "http://127.0.0.1:8000"


def add_server_word(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the server as a word, for a command that needs one. It is the value of --url, too."""
    parser.add_argument("server", metavar="URL", nargs="?", help=f"{what}, such as localhost:8000 (default: {DEFAULT_URL})")
    add_remote_flags(parser, "the same, as an option")


def add_remote_flags(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--url", metavar="URL", help=what)
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: OCTAVO_API_KEY)")


def server_url(args: argparse.Namespace, word: str | None) -> str | None:
    """Returns the server that a word or --url names, or None."""
    if word is not None and args.url is not None:
        args.fail(f"two servers, {word} and --url {args.url}; give one")
    return word if args.url is None else args.url


@contextmanager
def open_remote(url: str, key: str | None) -> Iterator[RemoteServer]:
    """Gives the server, and closes the connections to it at the end. Without a key it takes that of the environment."""
    server = RemoteServer(parse_url(url), key or api_key())
    try:
        yield server
    finally:
        server.close()
