"""Files that a command writes at its end, such as a report. Whether they can be written is checked before the work begins."""

import argparse
import os
from pathlib import Path

from octavo.errors import ConfigError
from octavo.report.document import Report, rendered


def add_report_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", metavar="FILE.html", help="write the result to this file, as a page with charts")


def check_target(flag: str, target: str | None) -> None:
    """At the start, not after minutes of work."""
    path = None if target is None else Path(target)
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"{flag} {path} cannot be written")


def write_target(flag: str, target: str, text: str) -> None:
    try:
        Path(target).write_text(text, encoding="utf-8", errors="backslashreplace")  # a file name may not be valid text
    except OSError as error:
        raise ConfigError(f"{flag} {target}: {error.strerror}") from error


def write_report(target: str, report: Report) -> None:
    write_target("--report", target, rendered(report))
