"""The whole terminal as a picture that rich redraws in place; q ends it."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.cli.top_picture import Line

STYLES = {
    "": "", "dim": "dim", "strong": "bold", "warn": "bold red",
    "free": "dim", "cached": "yellow", "in use": "cyan", "shared": "bold magenta",
}  # fmt: skip


def open_screen() -> "Screen | None":
    """None where rich is missing, or the terminal cannot be redrawn."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False)
    return Screen(console) if console.is_terminal and not console.is_dumb_terminal else None


class Screen:
    def __init__(self, console: Any) -> None:
        from rich.live import Live

        self.left = False  # somebody pressed q
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._before: list[Any] | None = None  # settings of the terminal

    def __enter__(self) -> "Screen":
        self._live.start()
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
            asyncio.get_running_loop().add_reader(sys.stdin, self._key)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            asyncio.get_running_loop().remove_reader(sys.stdin)
            with contextlib.suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
        self._live.stop()

    @property
    def size(self) -> tuple[int, int]:
        return self._console.size.width, self._console.size.height

    def show(self, lines: Sequence["Line"]) -> None:
        from rich.text import Text

        text = Text(no_wrap=True, overflow="crop")
        for number, line in enumerate(lines):
            text.append("\n" if number else "")
            for part, style in line:
                text.append(part, STYLES[style])
        self._live.update(text, refresh=True)

    def _key(self) -> None:
        typed = os.read(sys.stdin.fileno(), 64)
        if not typed or b"q" in typed.lower():
            self.left = True
