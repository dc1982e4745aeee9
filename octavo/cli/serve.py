"""`octavo serve`: a model behind HTTP, as OpenAI's clients expect it.

    octavo serve                             the default model on http://127.0.0.1:8000
    octavo serve MODEL --port 8080 --api-key KEY

What can be wrong is found out in the order of its price: settings, the port, the model's files, and only then the weights.
"""

import argparse
from typing import TYPE_CHECKING

from octavo import log
from octavo.cli.args import MODEL_HELP, add_server_flags, server_configs
from octavo.config import log_level

if TYPE_CHECKING:
    from octavo.server_config import ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo serve [options] [MODEL]"
    parser.add_argument("words", metavar="MODEL", nargs="?", help=MODEL_HELP)
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    engine, config = server_configs(args, args.words)
    log.setup(log_level("INFO"), config.log_format)
    from octavo.server.listen import bind

    listener = bind(config.host, config.port)
    _warn(config)
    from octavo.server.start import serve  # libraries of the server load here

    return serve(engine, config, listener)


def _warn(config: "ServerConfig") -> None:
    from octavo.server.listen import is_loopback

    if not config.api_key and not is_loopback(config.host):
        log.logger.warning(
            "NO KEY IS ASKED FOR: whoever can reach %s may use this server; give it --api-key or OCTAVO_API_KEY, or leave --host out",
            config.host,
        )
