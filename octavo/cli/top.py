"""`octavo top`: the block pool, requests, steps and events of a running server, live in the terminal. It shows no text.

    octavo top                               the server at http://127.0.0.1:8000, redrawn in place; q or Ctrl-C ends it
    octavo top gpu-7:8000 --once             one picture
    octavo top --engine 2                    of several engines, the one with the number 2
    octavo top | tee log.txt                 one line a second, as with --plain
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

from octavo.cli.opening import DEFAULT_URL, add_server_word, open_remote, server_url
from octavo.cli.top_picture import Line, figures_line, picture, plain
from octavo.inspector.remote import Watch

REDRAW_SECONDS = 0.25
LINE_SECONDS = 1.0
ONCE_SECONDS = 1.0  # from the first frame to the picture of --once
ONCE_LINES = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo top [URL] [options]"
    add_server_word(parser, "a running Octavo server")
    parser.add_argument("--engine", type=int, metavar="N", default=0, help="number of the engine, if the server has several (default: 0)")
    parser.add_argument("--plain", action="store_true", help="print one line a second; the default if the output is not a terminal")
    parser.add_argument("--once", action="store_true", help="print one picture and end")


def run(args: argparse.Namespace) -> int:
    url = server_url(args, args.server) or DEFAULT_URL
    with asyncio.Runner() as runner, open_remote(url, args.api_key) as server:  # the connections must end before their loop does
        watch = Watch(server, comes_back=not args.once, engine=args.engine)
        if args.once:
            runner.run(_once(watch))
        elif args.plain or not sys.stdout.isatty() or (screen := open_screen()) is None:
            runner.run(_lines(watch))
        else:
            runner.run(_live(watch, screen))
    return 0


async def _once(watch: Watch) -> None:
    """Prints one picture. It waits a moment first, so that there are steps to show."""
    async with _watching(watch) as task:
        await asyncio.wait({task, received := asyncio.ensure_future(watch.received.wait())}, return_when=asyncio.FIRST_COMPLETED)
        received.cancel()
        await asyncio.wait({task}, timeout=ONCE_SECONDS)
        if not watch.received.is_set():
            await task
    print("\n".join(plain(picture(watch, shutil.get_terminal_size().columns, ONCE_LINES))))


async def _lines(watch: Watch) -> None:
    """Prints a line of figures every second."""
    printed = None
    async with _watching(watch) as task:
        while not task.done():
            text = figures_line(watch)
            is_new = text != printed if watch.trouble is not None else watch.received.is_set()  # the same trouble is printed once
            if is_new:
                print(time.strftime("%H:%M:%S"), text, flush=True)
            printed = text
            await asyncio.wait({task}, timeout=LINE_SECONDS)
        await task


async def _live(watch: Watch, screen: "Screen") -> None:
    """Redraws the screen until q is pressed."""
    async with _watching(watch) as task:
        await asyncio.wait({task}, timeout=REDRAW_SECONDS)  # an error at the start is printed outside the screen, where it stays
        if task.done():
            await task
        with screen:
            while not task.done() and not screen.left:
                screen.show(picture(watch, *screen.size))
                await asyncio.wait({task}, timeout=REDRAW_SECONDS)
        if not screen.left:
            await task


@contextlib.asynccontextmanager
async def _watching(watch: Watch) -> AsyncIterator[asyncio.Task[None]]:
    """Gives a task that follows the server, and ends it at the end."""
    task = asyncio.create_task(watch.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# -- the screen

STYLES = {
    "": "", "dim": "dim", "strong": "bold", "warn": "bold red",
    "free": "dim", "cached": "yellow", "in use": "cyan", "shared": "bold magenta",
}  # fmt: skip


def open_screen() -> "Screen | None":
    """Returns None if rich is not installed, or if the terminal cannot be redrawn."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False)
    return Screen(console) if console.is_terminal and not console.is_dumb_terminal else None


class Screen:
    """The whole terminal as a picture that rich redraws in place."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live

        self.left = False  # True after q
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._before: list[Any] | None = None  # the settings of the terminal, to restore them

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

    def show(self, lines: Sequence[Line]) -> None:
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
