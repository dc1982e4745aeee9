"""`octavo top`: the block pool, requests, steps and events of a running server, live in the terminal. It shows no text.

    octavo top                               the server at http://127.0.0.1:8000, redrawn in place; q or Ctrl-C ends it
    octavo top http://gpu-7:8000 --once      one picture
    octavo top | tee log.txt                 one line a second, as with --plain
"""

import argparse
import asyncio
import contextlib
import shutil
import sys
import time
from typing import TYPE_CHECKING

from octavo.cli.remote import add_key_flag, open_remote

if TYPE_CHECKING:
    from octavo.cli.top_screen import Screen
    from octavo.cli.top_watch import Watch

DEFAULT_URL = "http://127.0.0.1:8000"
REDRAW_SECONDS = 0.25
LINE_SECONDS = 1.0
ONCE_SECONDS = 1.0  # after the first frame, so that there are steps to count
ONCE_LINES = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo top [URL] [options]"
    parser.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL, help=f"a running Octavo server (default: {DEFAULT_URL})")
    add_key_flag(parser)
    parser.add_argument("--plain", action="store_true", help="print one line a second; the default if the output is not a terminal")
    parser.add_argument("--once", action="store_true", help="print one picture and end")


def run(args: argparse.Namespace) -> int:
    from octavo.cli.top_screen import open_screen
    from octavo.cli.top_watch import Watch

    with asyncio.Runner() as runner, open_remote(args) as server:  # whose connections end before their loop
        watch = Watch(server, comes_back=not args.once)
        if args.once:
            runner.run(_once(watch))
        elif args.plain or not sys.stdout.isatty() or (screen := open_screen()) is None:
            runner.run(_lines(watch))
        else:
            runner.run(_live(watch, screen))
    return 0


async def _once(watch: "Watch") -> None:
    from octavo.cli.top_picture import picture, plain

    async with _watching(watch) as task:
        await asyncio.wait({task, told := asyncio.ensure_future(watch.told.wait())}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        await asyncio.wait({task}, timeout=ONCE_SECONDS)
        if not watch.told.is_set():
            await task
    print("\n".join(plain(picture(watch, shutil.get_terminal_size().columns, ONCE_LINES))))


async def _lines(watch: "Watch") -> None:
    from octavo.cli.top_picture import figures_line

    said = None
    async with _watching(watch) as task:
        while not task.done():
            text = figures_line(watch)
            news = text != said if watch.trouble is not None else watch.told.is_set()  # trouble is told once
            if news:
                print(time.strftime("%H:%M:%S"), text, flush=True)
            said = text
            await asyncio.wait({task}, timeout=LINE_SECONDS)
        await task


async def _live(watch: "Watch", screen: "Screen") -> None:
    from octavo.cli.top_picture import picture

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
async def _watching(watch: "Watch"):  # type: ignore[no-untyped-def]
    task = asyncio.create_task(watch.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
