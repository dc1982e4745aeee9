"""`octavo verify`: prove that paging is invisible, on the model at hand, and say what was compared."""

import argparse
import sys
from typing import TYPE_CHECKING

from octavo.cli.args import MODEL_HELP, add_engine_flags, engine_config
from octavo.cli.targets import add_report_flag, check_target, write_report

if TYPE_CHECKING:
    from octavo.engine.verify import Verified

DEFAULT_REQUESTS = 40
MOST_REQUESTS = 100_000
# The schedule sets the rest.
SETTINGS = ("revision", "dtype", "quantization", "device", "load_format", "block_size", "kv_cache_dtype", "native", "cpu_isa", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", metavar="MODEL", nargs="?", help=MODEL_HELP)
    text = f"requests in the stress schedule (default: {DEFAULT_REQUESTS})"
    parser.add_argument("--requests", type=_count, metavar="N", default=DEFAULT_REQUESTS, help=text)
    add_report_flag(parser)
    add_engine_flags(parser, only=SETTINGS)


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MOST_REQUESTS:
        raise argparse.ArgumentTypeError(f"wanted a number from 1 to {MOST_REQUESTS}, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args, args.words)  # before torch loads: it may be all that is asked for
    check_target("--report", args.report)
    from octavo.cli.verify_report import verified_text, verify_report
    from octavo.engine.verify import verify
    from octavo.errors import VerifyError
    from octavo.loading.resolve import load_model_config, source_of

    source = source_of(config)
    model = load_model_config(source)
    facts = {"command": args.typed, "model": source.name, "block size": str(config.block_size)}
    results: list[Verified] = []
    failure: str | None = None
    for depth in (1, 2):
        print(f"verifying {source.name}, pipeline depth {depth} ...", file=sys.stderr)
        try:
            results.append(verify(config, source, model, depth, args.requests))
        except VerifyError as error:
            failure = f"NOT VERIFIED at pipeline depth {depth}: {error}"
            break
    print(failure or verified_text(source.name, config.block_size, results))
    if args.report is not None:
        write_report(args.report, verify_report(source.name, facts, results, failure))
    return 0 if failure is None else 1
