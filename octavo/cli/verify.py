"""`octavo verify`: prove that paging is invisible, on the model at hand, and say what was compared."""

import argparse
import sys
from typing import TYPE_CHECKING

from octavo.cli.args import MODEL_HELP, add_engine_flags, engine_config

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
    add_engine_flags(parser, only=SETTINGS)


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MOST_REQUESTS:
        raise argparse.ArgumentTypeError(f"wanted a number from 1 to {MOST_REQUESTS}, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args, args.words)  # before torch loads: it may be all that is asked for
    from octavo.engine.verify import verify
    from octavo.errors import VerifyError
    from octavo.loading.resolve import load_model_config, source_of

    source = source_of(config)
    model = load_model_config(source)
    results: list[Verified] = []
    for depth in (1, 2):
        print(f"verifying {source.name}, pipeline depth {depth} ...", file=sys.stderr)
        try:
            results.append(verify(config, source, model, depth, args.requests))
        except VerifyError as error:
            print(f"NOT VERIFIED at pipeline depth {depth}: {error}")
            return 1
    print(_table(source.name, config.block_size, results))
    return 0


def _table(name: str, block_size: int, results: "list[Verified]") -> str:
    rows = [
        ("requests", [r.requests for r in results]),
        ("steps compared", [r.compared.steps for r in results]),
        ("rows compared (all layers)", [r.compared.rows for r in results]),
        ("cache values, bit for bit", [r.compared.cache_values for r in results]),
        ("attention outputs, bit for bit", [r.compared.output_values for r in results]),
        ("prompt tokens from the cache", [r.cached_tokens for r in results]),
        ("preemptions", [r.preemptions for r in results]),
        ("samples forked", [r.compared.forks for r in results]),
        ("blocks allocated", [r.pool.taken for r in results]),
        ("blocks shared", [r.pool.shared for r in results]),
        ("blocks copied on write", [r.compared.copies for r in results]),
        ("blocks evicted", [r.pool.evicted for r in results]),
    ]
    first = results[0]
    what = f"{name}, {first.dtype}, {first.kernels} kernels, blocks of {block_size} in {first.kv_cache_dtype}"
    head = f"{what}: paged and contiguous caches agree bit for bit"
    lines = [head, f"{'':32}" + "".join(f"{f'depth {r.depth}':>16}" for r in results)]
    lines += [f"{label:32}" + "".join(f"{value:>16,}" for value in values) for label, values in rows]
    return "\n".join(lines)
