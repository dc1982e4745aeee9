"""What `octavo bench` shares: MODEL, --rounds, and where the figures go."""

import argparse
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.bench.figures import Result
from octavo.bench.picture import Panel, draw
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.machine import Machine
    from octavo.bench.serving.report import Client

MOST = 1_000_000


def add_common_flags(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("words", metavar="MODEL", nargs="?", help="a model folder or a .gguf file; without one, the default model")
    parser.add_argument("--rounds", type=count, metavar="N", default=rounds, help=f"how often it is measured (default: {rounds})")
    add_target_flags(parser)


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write all figures here, with the machine and the command")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw the figures")


def count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"wanted a number from 1 to {MOST}, got {text!r:.40}")
    return int(text)


def check_targets(args: argparse.Namespace) -> None:
    """Now, not after minutes of measuring."""
    for flag, target in (("--json", args.json), ("--picture", args.picture)):
        path = None if target is None else Path(target)
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise ConfigError(f"{flag} {path} cannot be written")


def publish(
    args: argparse.Namespace, kind: str, machine: "Machine | Client", results: Sequence[Result], table: str, panels: Sequence[Panel]
) -> None:
    """The table to stdout, the rest where it was asked for."""
    print(f"{machine}\n{table}")
    if args.json is not None:
        found = {"kind": kind, "command": args.typed, "machine": asdict(machine), "results": [result.as_json() for result in results]}
        _write("--json", args.json, json.dumps(found, indent=1) + "\n")
    if args.picture is not None:
        _write("--picture", args.picture, draw(f"{machine.model}: {kind}", panels, [args.typed, str(machine)]))


def _write(flag: str, target: str, text: str) -> None:
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {target}: {error.strerror}") from error
