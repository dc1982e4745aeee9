"""Files a command is told to write: refused before the work begins where they cannot be, written after it; among them the report."""

import argparse
import os
from pathlib import Path

from octavo.errors import ConfigError
from octavo.report.document import Report, rendered


def add_report_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", metavar="FILE.html", help="write what was found as a report with pictures, to open in any browser")


def check_target(flag: str, target: str | None) -> None:
    """Now, not after minutes of work."""
    path = None if target is None else Path(target)
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"{flag} {path} cannot be written")


def write_target(flag: str, target: str, text: str) -> None:
    try:
        Path(target).write_text(text, encoding="utf-8", errors="backslashreplace")  # a name on this machine may be no text
    except OSError as error:
        raise ConfigError(f"{flag} {target}: {error.strerror}") from error


def write_report(target: str, report: Report) -> None:
    write_target("--report", target, rendered(report))
