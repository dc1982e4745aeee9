"""Makes the pictures of the page that README and docs show: real servers, the default model, this machine's Chromium.

    pip install pillow && python docs/pictures/make.py             all of them; takes some minutes
    python docs/pictures/make.py lesson demo                       those of these functions

`page-light.png` is what `make serve` shows with its default settings.
"""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from docs.demo.make import DEMO, build

HERE = Path(__file__).parent
DESK = {"width": 1360, "height": 850}
PHONE = {"width": 390, "height": 844}
QUESTION = "Why is the sky blue?"
OPENINGS = ("Once upon a time", "The ship left the harbour", "In the library", "Nobody had seen the garden", "It rained", "My uncle's shop")
MINUTE = 60_000  # ms
STILL_SECONDS = 0.7  # for frames to come and marks to settle


@contextmanager
def served(*flags: str) -> Iterator[str]:
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.match(r"Octavo is ready: (\S+)", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop the server
        yield url
        server.terminate()


@contextmanager
def opened(browser: Browser, url: str, size: dict[str, int] = DESK, scheme: str = "light") -> Iterator[Page]:
    page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1)  # type: ignore[arg-type]
    page.goto(url)
    page.locator(".pool-figures").filter(has_text="blocks").wait_for()
    yield page
    page.close()


def shoot(page: Page, name: str) -> None:
    """The page as it is; with 256 colours a picture has a third of the bytes, and nobody sees a difference."""
    time.sleep(STILL_SECONDS)
    path = HERE / f"{name}.png"
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


def ask(page: Page, text: str) -> None:
    page.get_by_placeholder("Ask something").last.fill(text)
    page.keyboard.press("Enter")


def wait_for_words(page: Page, count: int) -> None:
    """Until the last answer has as many characters: it is still being written."""
    ready = "count => [...document.querySelectorAll('[aria-label=Answer]')].at(-1)?.textContent.length > count"
    page.wait_for_function(ready, arg=count, timeout=5 * MINUTE)


def chats(browser: Browser) -> None:
    """`make serve` as it is: nothing asked yet, one conversation, two, and the same on a phone."""
    with served() as url:
        for scheme in ("light", "dark"):
            with opened(browser, url, scheme=scheme) as page:
                shoot(page, f"page-first-{scheme}")
        with opened(browser, url) as page:
            ask(page, QUESTION)
            wait_for_words(page, 400)
            page.get_by_role("button", name="Show in the pool").first.click()
            shoot(page, "page-light")
            page.get_by_role("button", name="Regenerate").wait_for(timeout=5 * MINUTE)  # the answer is complete
            page.get_by_role("button", name="Branch").first.click()
            ask(page, "Say it again, shorter.")
            wait_for_words(page, 100)
            shoot(page, "page-columns")
        with opened(browser, url, PHONE) as page:
            ask(page, QUESTION)
            wait_for_words(page, 300)
            shoot(page, "page-phone-chat")
            page.get_by_role("link", name="Block pool").click()
            shoot(page, "page-phone")


def lesson(browser: Browser) -> None:
    with served("--lesson") as url, opened(browser, url, scheme="dark") as page:
        page.get_by_role("button", name="Lesson", exact=True).click()
        page.get_by_role("button", name=re.compile("Scene 4")).click()
        page.get_by_role("button", name="Play again").wait_for(timeout=MINUTE)
        shoot(page, "page-dark")


def many_blocks(browser: Browser) -> None:
    with served("--num-gpu-blocks-override", "10001") as url, opened(browser, url) as page:
        load(url, 48, 100, 600)
        page.wait_for_function("() => parseInt(document.querySelector('.pool-figures').textContent) > 400", timeout=10 * MINUTE)
        shoot(page, "page-10000")


def load(url: str, count: int, prompt: int, answer: int) -> None:
    """Requests that share beginnings by sixes, all at once."""

    def one(number: int) -> None:
        text = (OPENINGS[number % len(OPENINGS)] + ", so they said, ") * prompt + str(number)
        body = json.dumps({"prompt": text, "max_tokens": answer, "ignore_eos": True}).encode()
        with suppress(OSError):  # the picture is taken before the answers are complete, and then the server ends
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})).close()

    for number in range(count):
        threading.Thread(target=one, args=(number,), daemon=True).start()


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def demo(browser: Browser) -> None:
    build(DEMO)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietFiles, directory=str(DEMO))) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        with opened(browser, f"http://127.0.0.1:{host.server_port}/") as page:
            shoot(page, "demo")
        host.shutdown()


PICTURES = {make.__name__: make for make in (chats, lesson, many_blocks, demo)}

if __name__ == "__main__":
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name in sys.argv[1:] or PICTURES:
            PICTURES[name](browser)
        browser.close()
