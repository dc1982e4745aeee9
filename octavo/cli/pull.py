"""`octavo pull` downloads a model into the hub's cache, or finishes a download that was interrupted."""

import argparse

from octavo import log
from octavo.config import log_level
from octavo.progress import in_units

EXAMPLES = """examples:
  octavo pull Qwen/Qwen3-0.6B             the safetensors of a repository
  octavo pull Qwen/Qwen3-0.6B-GGUF:Q8_0   one GGUF file of a repository
  octavo chat Qwen/Qwen3-0.6B             chat with it

An interrupted download continues where it stopped. HF_HOME or HF_HUB_CACHE sets where models are kept,
HF_TOKEN gives access to gated and private ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("words", metavar="MODEL", help="owner/name[@revision][:QUANT] on the hub")
    parser.add_argument("--revision", metavar="TEXT", help="a branch, a tag or a commit")


def run(args: argparse.Namespace) -> int:
    log.setup(log_level("WARNING"))
    from octavo.loading.files import missing_parts, no_model_folder
    from octavo.loading.hub import fetch_model
    from octavo.loading.hub_cache import size_of
    from octavo.loading.resolve import ModelSource, in_cache, load_model_config, locate

    found = locate(args.words, args.revision)
    if isinstance(found, ModelSource):
        load_model_config(found)
        if found.kind == "folder" and missing_parts(found.path):
            raise no_model_folder(found.path)
        print(f"{found.name} is on this machine already, in {found.path}")
        return 0
    path = fetch_model(found)
    load_model_config(in_cache(found, path))  # an error if Octavo cannot open this kind of model
    print(f"{found.shown} is ready: {in_units(size_of(path))} in {path}")
    return 0
