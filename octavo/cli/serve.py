"""`octavo serve`: a model behind HTTP, as OpenAI's clients expect it.

    octavo serve                             the default model on http://127.0.0.1:8000
    octavo serve MODEL --port 8080 --api-key KEY

What can be wrong is found out in the order of its price: settings, the port, the model's files, and only then the weights.
"""

import argparse
import signal
from types import FrameType

from octavo import log
from octavo.cli.args import MODEL_HELP, add_server_flags, server_configs
from octavo.config import debug_from_environment, log_level
from octavo.server.listen import bind
from octavo.server.privacy import who_reads
from octavo.server_config import ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo serve [options] [MODEL]"
    parser.add_argument("words", metavar="MODEL", nargs="?", help=MODEL_HELP)
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    engine, config = server_configs(args, args.words)
    signal.signal(signal.SIGTERM, _leave)
    log.setup(log_level("INFO"), config.log_format)
    if switches := debug_from_environment().switched_on:
        log.logger.warning("OCTAVO_DEBUG is set, for tests only: %s", ", ".join(switches))
    listener = bind(config.host, config.port)
    _warn(config)
    from octavo.loading.text_side import open_text_side

    text = open_text_side(engine)
    from octavo.server.start import serve  # the server's libraries load here

    return serve(engine, config, listener, text)


def _leave(number: int, frame: FrameType | None) -> None:
    """Told to stop before anybody was served: there is nothing to wait for."""
    raise SystemExit(0)


def _warn(config: ServerConfig) -> None:
    """A server without a key that other machines can reach deserves a warning; with a key it is worth a line."""
    if said := who_reads(config):
        tell = log.logger.info if config.api_key else log.logger.warning
        tell("%s", said)
