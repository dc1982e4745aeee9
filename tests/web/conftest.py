"""A real browser before a real server. What a test did not expect fails it at its end: an error on the console, a request to another host.

Where there is no browser the tests skip, and say how to get one; in CI, where nothing may skip, `.ci/run` installs it.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from docs.demo.make import build
from tests.support.chromium import launch
from tests.support.server_process import ServerProcess
from tests.support.story_folder import story_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

PATIENCE_MS = 60_000  # until something must have happened: a busy machine takes its time, and whoever passes does not wait
NO_VIEW = "404 .*/v1/view$"  # how a server without the inspector answers, and a host of plain files


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """For one file: while it is open this thread has a running event loop, and other tests want one of their own."""
    from playwright.sync_api import expect, sync_playwright  # files of tests skip where it is missing

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        yield launch(playwright)


@dataclass
class Watched:
    """A page and what went wrong on it; `expected` are the parts of messages that a test means to cause."""

    page: "Page"
    expected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def watch(self, home: str) -> None:
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._note(request, home))

    def _hear(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} {message.location['url']}")

    def _note(self, request: "Request", home: str) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != urlsplit(home).netloc:
            self.elsewhere.append(request.url)

    def check(self) -> None:
        assert self.elsewhere == []
        assert [text for text in self.errors if not any(re.search(pattern, text) for pattern in self.expected)] == []


OpenPage = Callable[..., Watched]


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[OpenPage]:
    """`open_page(url)`: a tab of its own, with storage of its own; keywords are those of a browser context."""
    opened: list[Watched] = []
    with ExitStack() as stack:

        def open_one(url: str, expected: list[str] | None = None, **settings: object) -> Watched:
            context = browser.new_context(**settings)  # type: ignore[arg-type]
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            watched = Watched(page, expected or [])
            watched.watch(url)
            opened.append(watched)
            page.goto(url)
            return watched

        yield open_one
        for watched in opened:
            watched.check()


@pytest.fixture
def open_stand_in(open_page: OpenPage) -> OpenPage:
    """`speaking` has no view."""

    def open_one(url: str, expected: list[str] | None = None, **settings: object) -> Watched:
        return open_page(url, [NO_VIEW, *(expected or [])], **settings)

    return open_one


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real `octavo serve`, with a story model that nothing ends but its length."""
    folder = story_folder(tmp_path_factory.mktemp("web") / "stories", end_ids=[])
    flags = ("--model", str(folder), "--served-model-name", "stories", "--max-model-len", "512", "--block-size", "4")
    with ServerProcess("octavo serve", *flags, "--num-gpu-blocks-override", "5000") as process:  # not the million that there is room for
        yield address(process)


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def plain_files(folder: Path) -> Iterator[str]:
    """The address of a static host that has this folder, and nothing else."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietFiles, directory=str(folder))) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{host.server_port}"
        host.shutdown()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A static host that has the demo, not at its top."""
    top = tmp_path_factory.mktemp("host")
    build(top / "some" / "where")
    with plain_files(top) as url:
        yield f"{url}/some/where/"


@pytest.fixture
def page(server: str, open_page: OpenPage) -> "Page":
    return open_page(server).page


def address(process: ServerProcess) -> str:
    return f"http://{process.host}:{process.port}"
