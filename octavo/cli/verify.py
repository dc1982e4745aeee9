"""`octavo verify`: run a model with a contiguous cache beside the paged one, and compare them bit for bit in every step."""

import argparse
import sys
from typing import TYPE_CHECKING

from octavo.cli.args import MODEL_HELP, add_engine_flags, engine_config
from octavo.cli.targets import add_report_flag, check_target, write_report

if TYPE_CHECKING:
    from octavo.engine.verify import Verified

DEFAULT_REQUESTS = 40
LEAST_REQUESTS = 12  # tried with block sizes of 1 to 256, both depths and many seeds: with fewer, a case such as an eviction may not happen
MOST_REQUESTS = 100_000
CASES = "a prefix hit, a fork, a copy on write, a preemption and an eviction"
EXAMPLES = """examples:
  octavo verify                              the default model
  octavo verify Qwen/Qwen3-0.6B              a model of the hub
  octavo verify --report proof.html          the result as a page with pictures

Exit code 0: all values are equal. 1: the first difference is shown."""
# The schedule sets the rest.
SETTINGS = ("revision", "dtype", "quantization", "device", "load_format", "block_size", "kv_cache_dtype", "native", "cpu_isa", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [MODEL]"
    parser.epilog = EXAMPLES
    parser.add_argument("words", metavar="MODEL", nargs="?", help=MODEL_HELP)
    text = f"number of requests, at least {LEAST_REQUESTS} (default: {DEFAULT_REQUESTS})"
    parser.add_argument("--requests", type=_count, metavar="N", default=DEFAULT_REQUESTS, help=text)
    add_report_flag(parser)
    add_engine_flags(parser, only=SETTINGS)


def _count(text: str) -> int:
    if not text.isdigit() or not LEAST_REQUESTS <= int(text) <= MOST_REQUESTS:
        why = f"fewer than {LEAST_REQUESTS} may not cause {CASES}, and then nothing is proven"
        raise argparse.ArgumentTypeError(f"must be a number from {LEAST_REQUESTS} to {MOST_REQUESTS}, got {text[:40]!r}: {why}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args, args.words)  # before torch loads: --show-config ends here
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
