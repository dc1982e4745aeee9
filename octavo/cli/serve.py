"""`octavo serve` starts a server with OpenAI's API and a web page.

The cheap checks come first: settings, the port, the model's files. Then the engine process imports torch and loads the weights.
"""

import argparse
import os
import signal
from types import FrameType

from octavo import log
from octavo.cli.args import MODEL_HELP, add_server_flags, server_configs
from octavo.config import debug_from_environment, log_level
from octavo.server.listen import bind, who_reads
from octavo.server_config import ServerConfig

EXAMPLES = """examples:
  octavo serve                                     the default model at http://127.0.0.1:8000
  octavo serve Qwen/Qwen3-0.6B --max-model-len 8k  a model of the hub, with a shorter context
  octavo serve model.gguf --port 8080 --api-key KEY
  octavo serve --lesson                            a tiny KV cache, and scenes that show how paging works

Open the address in a browser for the page. Clients use the address with /v1, such as http://127.0.0.1:8000/v1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [MODEL]"
    parser.epilog = EXAMPLES
    parser.add_argument("words", metavar="MODEL", nargs="?", help=MODEL_HELP)
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    engine, config = server_configs(args, args.words)
    signal.signal(signal.SIGTERM, _end)
    log.setup(log_level("INFO"), config.log_format)
    if switches := debug_from_environment().switched_on:
        log.logger.warning("OCTAVO_DEBUG is set, for tests only: %s", ", ".join(switches))
    listener = bind(config.host, config.port)
    _warn(config)
    from octavo.loading.text_side import open_text_side
    from octavo.sizing.memory_plan import check_max_model_len

    text = open_text_side(engine)
    check_max_model_len(engine.max_model_len, text.model.max_position)
    from octavo.server.run import serve  # the server's libraries load here

    signal.signal(signal.SIGTERM, _leave)
    return serve(engine, config, listener, text)


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the command when SIGTERM comes before there are other processes. An exception could be lost or wrapped inside an import."""
    os._exit(0)


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the command when SIGTERM comes while the engine starts. No request is running yet, so there is nothing to wait for."""
    raise SystemExit(0)


def _warn(config: ServerConfig) -> None:
    """Logs who else can read what, if other machines reach this server: a warning if it has no key, else a note."""
    if notice := who_reads(config):
        log_notice = log.logger.info if config.api_key else log.logger.warning
        log_notice("%s", notice)
