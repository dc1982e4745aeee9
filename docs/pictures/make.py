"""Makes the pictures of the page that README and docs show: real servers, the default model, Debian's Chromium by Playwright.

    python docs/pictures/make.py
"""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).parent
DESK = {"width": 1360, "height": 850}
PHONE = {"width": 390, "height": 844}
QUESTION = "Tell me a story about a rabbit and a clock."
OPENINGS = ("Once upon a time", "The ship left the harbour", "In the library", "Nobody had seen the garden", "It rained", "My uncle's shop")


@contextmanager
def served(*flags: str) -> Iterator[str]:
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        yield next(found[1] for line in server.stderr if (found := re.match(r"Octavo is ready: (\S+)", line)))
        server.terminate()


@contextmanager
def opened(browser: Browser, url: str, size: dict[str, int], scheme: str = "light") -> Iterator[Page]:
    page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1)  # type: ignore[arg-type]
    page.goto(url)
    page.wait_for_selector("#about:has-text('tokens of context')")
    yield page
    page.close()


def ask(page: Page, text: str) -> None:
    page.get_by_placeholder("Ask something").last.fill(text)
    page.keyboard.press("Enter")


def load(url: str, count: int, prompt: int, answer: int) -> None:
    """Requests that share beginnings by sixes, all at once."""

    def one(number: int) -> None:
        text = (OPENINGS[number % len(OPENINGS)] + ", so they said, ") * prompt + str(number)
        body = json.dumps({"prompt": text, "max_tokens": answer, "ignore_eos": True}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})).close()

    for number in range(count):
        threading.Thread(target=one, args=(number,), daemon=True).start()


def shoot(page: Page, name: str) -> None:
    page.screenshot(path=HERE / f"{name}.png")
    print(f"{name}.png: {(HERE / f'{name}.png').stat().st_size:,} bytes", flush=True)


def chats(browser: Browser) -> None:
    with served("--num-gpu-blocks-override", "160", "--max-model-len", "1024") as url:
        with opened(browser, url, DESK) as page:
            ask(page, QUESTION)
            page.get_by_role("button", name="Show in the pool").first.wait_for()
            page.get_by_role("button", name="Branch").first.click()
            ask(page, "Tell it again, but shorter.")
            load(url, 3, 2, 60)
            time.sleep(1.0)
            page.get_by_role("button", name="Show in the pool").first.click()
            time.sleep(0.5)
            shoot(page, "page-light")
        with opened(browser, url, PHONE) as page:
            ask(page, QUESTION)
            load(url, 3, 2, 80)
            time.sleep(1.0)
            page.get_by_role("link", name="Block pool").click()
            time.sleep(0.3)
            shoot(page, "page-phone")


def lesson(browser: Browser) -> None:
    with served("--lesson") as url, opened(browser, url, DESK, "dark") as page:
        page.get_by_role("button", name="Lesson", exact=True).click()
        page.get_by_role("button", name=re.compile("A burst")).click()
        time.sleep(2.0)  # of three
        shoot(page, "page-dark")


def many_blocks(browser: Browser) -> None:
    with served("--num-gpu-blocks-override", "10001") as url, opened(browser, url, DESK) as page:
        load(url, 48, 100, 400)
        time.sleep(30.0)
        shoot(page, "page-10000")


if __name__ == "__main__":
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        chats(browser)
        lesson(browser)
        many_blocks(browser)
        browser.close()
