"""What a command reads and writes: stdin, text on stdout that cannot control a terminal, and files at its end, such as a report."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from octavo.report.document import Report

# Characters that control a terminal, alone or at the start of a sequence: all control characters but new line and tab.
STEERING = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
STEERING |= dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}") | {0x7F: "\N{SYMBOL FOR DELETE}"}


def can_show(signs: str) -> bool:
    """Whether the encoding of stdout has all these characters."""
    try:
        signs.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def for_stdout(text: str) -> str:
    """Returns text of a model or a server without characters that control a terminal. For a file or a pipe it returns it unchanged."""
    return text.translate(STEERING) if sys.stdout.isatty() else text


def read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text (byte {error.start})", "stdin") from error


def add_report_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", metavar="FILE.html", help="write the result to this file, as a page with charts")


def check_target(flag: str, target: str | None) -> None:
    """Raises an error if the file cannot be written. Commands call it before they begin to work, not after minutes."""
    path = None if target is None else Path(target)
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"{flag} {path} cannot be written")


def write_target(flag: str, target: str, text: str) -> None:
    try:
        Path(target).write_text(text, encoding="utf-8", errors="backslashreplace")  # a file name may not be valid text
    except OSError as error:
        raise ConfigError(f"{flag} {target}: {error.strerror}") from error


def write_report(target: str, report: "Report") -> None:
    from octavo.report.document import rendered  # a chat needs no reports, and starts sooner without them

    write_target("--report", target, rendered(report))
