"""`octavo rm` removes a downloaded model from the hub's cache. It asks first."""

import argparse
import sys

from octavo.errors import ConfigError, LoadError
from octavo.progress import in_units

EXAMPLES = """examples:
  octavo rm Qwen/Qwen3-0.6B             all files of a repository, every revision
  octavo rm Qwen/Qwen3-0.6B-GGUF:Q8_0   one GGUF file of a repository

Other programs share the hub's cache (HF_HOME, HF_HUB_CACHE): they would have to download the model again, too.
Nothing outside the cache is removed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("words", metavar="MODEL", help="owner/name[:QUANT], as `octavo list` shows it")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    from octavo.loading.hub_cache import removal
    from octavo.loading.hub_client import Hub
    from octavo.loading.names import NAME, PACKAGE, is_default_name, parse_hub_name
    from octavo.loading.ollama_names import meant_on_hub

    if is_default_name(args.words):
        raise ConfigError(f"{NAME} is the default model, which is part of an installed package: run `pip uninstall {PACKAGE}`")
    name, cache = parse_hub_name(args.words), Hub.from_environment().cache
    if name is None:
        meant = meant_on_hub(args.words)
        hint = f"; did you mean {meant}?" if meant else ": give owner/name[:QUANT], as `octavo list` shows it"
        raise ConfigError(f"{args.words[:200]!r} is not a downloaded model{hint}")
    if name.revision is not None:
        raise ConfigError(f"octavo rm removes every revision of a model: leave @{name.revision} off")
    found = removal(cache, name)
    if not args.yes and not _agreed(f"Remove {name.shown}, {in_units(found.size)}, from {cache}? Other programs share this cache."):
        print("nothing was removed")
        return 1
    try:
        found.execute()
    except OSError as error:
        raise LoadError(f"{name.shown} cannot be removed from {cache} ({error.strerror})") from error
    print(f"removed {name.shown}, {in_units(found.size)}")
    return 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("octavo rm asks before it removes a model, and there is no terminal to ask at: give --yes")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
