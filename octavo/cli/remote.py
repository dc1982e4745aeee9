"""The flags of a command that uses a running server, and the connection to it."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.client.api import RemoteServer
from octavo.client.http import parse_url
from octavo.config import api_key


def add_remote_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    text = "use this running server, Octavo's or another with OpenAI's API: http://127.0.0.1:8000"
    parser.add_argument("--url", metavar="URL", required=required, help=text)
    add_key_flag(parser)


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: OCTAVO_API_KEY)")


@contextmanager
def open_remote(args: argparse.Namespace) -> Iterator[RemoteServer]:
    server = RemoteServer(parse_url(args.url), args.api_key or api_key())
    try:
        yield server
    finally:
        server.close()
