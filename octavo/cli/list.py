"""`octavo list` prints the models on this machine that need no download."""

import argparse
import time

from octavo.cli.in_out import for_stdout
from octavo.progress import in_units

HOUR, DAY = 3600, 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The list holds the default model and the models in the hub's cache (HF_HOME, HF_HUB_CACHE), which other\n"
        "programs share. A name in the first column can be given to every command that takes a MODEL.\n"
        "LAST USED is when the files were last read, by any program."
    )


def run(args: argparse.Namespace) -> int:
    from octavo.loading.hub_cache import cached_repositories, installed_default
    from octavo.loading.hub_client import Hub

    cache = Hub.from_environment().cache
    repositories = cached_repositories(cache)
    default = installed_default()
    models = [] if default is None else [default]
    models += [model for repository in repositories for model in repository.models]
    rows = [("NAME", "SIZE", "KIND", "LAST USED")]
    rows += [(model.name, in_units(model.size), model.kind, _ago(time.time() - model.last_used)) for model in models]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print(for_stdout(f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:{widths[2]}}  {row[3]}".rstrip()))
    for repository in repositories:
        if not repository.models:
            print(for_stdout(f"{repository.repo}: {_why_not(repository.is_incomplete)} ({in_units(repository.size)})"))
    if default is not None:
        print(f"{default.name} is the default model.")
    if not repositories:
        print(f"There is no other model in {cache}. `octavo pull owner/name` downloads one.")
    return 0


def _why_not(is_incomplete: bool) -> str:
    return "not complete, `octavo pull` continues the download" if is_incomplete else "not a model that Octavo can open"


def _ago(seconds: float) -> str:
    if seconds < HOUR:
        return "less than an hour ago"
    count, unit = (int(seconds // HOUR), "hour") if seconds < 2 * DAY else (int(seconds // DAY), "day")
    return f"{count} {unit}{'' if count == 1 else 's'} ago"
