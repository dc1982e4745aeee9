"""What the sub-commands of `octavo bench` share: MODEL, --rounds, and the files they write."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from octavo.bench.figures import Lines, Result, aligned
from octavo.bench.picture import Panel, draw, sections
from octavo.cli.args import MODEL_HELP
from octavo.cli.in_out import add_report_flag, check_target, write_report, write_target
from octavo.report.document import Report

if TYPE_CHECKING:
    from octavo.bench.machine import Machine
    from octavo.bench.serving import Client

MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown of the results."""

    verdict: str  # one sentence
    head: str  # above the table
    lines: Lines
    panels: Sequence[Panel]


def add_common_flags(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.usage = "%(prog)s [options] [MODEL]"
    parser.add_argument("words", metavar="MODEL", nargs="?", help=MODEL_HELP)
    parser.add_argument("--rounds", type=count, metavar="N", default=rounds, help=f"number of measurements (default: {rounds})")
    add_target_flags(parser)


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file, with the machine and the command")
    parser.add_argument("--picture", metavar="FILE.svg", help="write a chart of the figures to this file")
    add_report_flag(parser)


def count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {MOST}, got {text!r:.40}")
    return int(text)


def check_targets(args: argparse.Namespace) -> None:
    for flag, target in (("--json", args.json), ("--picture", args.picture), ("--report", args.report)):
        check_target(flag, target)


def publish(args: argparse.Namespace, kind: str, machine: "Machine | Client", results: Sequence[Result], shown: Shown) -> None:
    """Prints the table, and writes the files that were asked for."""
    print(f"{machine}\n{shown.head}\n\n{aligned(shown.lines)}")
    if args.json is not None:
        found = {"kind": kind, "command": args.typed, "machine": asdict(machine), "results": [result.as_json() for result in results]}
        write_target("--json", args.json, json.dumps(found, indent=1) + "\n")
    if args.picture is not None:
        write_target("--picture", args.picture, draw(f"{machine.model}: {kind}", shown.panels, [args.typed, str(machine)]))
    if args.report is not None:
        facts = {"command": args.typed, **{name: str(value) for name, value in asdict(machine).items() if value is not None}}
        parts = sections(results, shown.head, shown.lines, shown.panels)
        write_report(args.report, Report(f"octavo bench {kind}", machine.model, shown.verdict, None, parts, facts))
