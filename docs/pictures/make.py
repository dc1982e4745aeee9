"""Makes the pictures of the page that README and docs show: real servers, the default model, this machine's Chromium.

    pip install pillow && python docs/pictures/make.py             all of them; takes some minutes
    python docs/pictures/make.py many_blocks phone                 those of these functions

`desk` and `phone` take theirs on the walk that tests/web/test_walk.py tests (tests/web/walk.py).
"""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.chromium import launch
from tests.web import walk

HERE = Path(__file__).parent
DESK = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
STOPS = {  # of the walk -> pictures, and light or dark
    "welcome": {"page-first-light": "light"},
    "shared blocks": {"page-light": "light"},
    "columns": {"page-columns": "light"},
    "lesson": {"page-dark": "dark"},
    "phone: block pool": {"page-phone": "light"},
}
ANSWERS_BEGUN = 110  # blocks in use: the twelve answers are some lines long
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
        try:
            yield url
        finally:
            server.terminate()


@contextmanager
def opened(browser: Browser, **settings: Any) -> Iterator[Page]:
    context = browser.new_context(**{"viewport": DESK, "color_scheme": "light"} | settings)
    context.set_default_timeout(MINUTE)
    yield context.new_page()
    context.close()


def shoot(page: Page, name: str) -> None:
    """The page as it is; with 256 colours a picture has a third of the bytes, and nobody sees a difference."""
    time.sleep(STILL_SECONDS)
    path = HERE / f"{name}.png"
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


def look(page: Page, stop: str) -> None:
    """A picture, if there is one of this stop."""
    for name, scheme in STOPS.get(stop, {}).items():
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        if stop == "shared blocks":
            wait_for_blocks(page, ANSWERS_BEGUN)
            walk.point_at_what_they_share(page)
        shoot(page, name)
    page.emulate_media(color_scheme="light")


def wait_for_blocks(page: Page, count: int) -> None:
    """Until so many are in use."""
    page.wait_for_function("count => parseInt(document.querySelector('.pool-figures').textContent) >= count", arg=count)


def desk(browser: Browser) -> None:
    """`make serve` as it is."""
    with served() as url, opened(browser) as page:
        walk.on_a_desk(page, url, partial(look, page))


def phone(browser: Browser) -> None:
    with served() as url, opened(browser, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        walk.on_a_phone(page, url, partial(look, page))


def many_blocks(browser: Browser) -> None:
    """Requests that share beginnings by sixes."""
    prompts = [(OPENINGS[number % len(OPENINGS)] + ", so they said, ") * 100 + str(number) for number in range(48)]
    with served("--num-gpu-blocks-override", "10001") as url, opened(browser) as page:
        page.goto(url)
        with walk.requests(url, "/v1/completions", [{"prompt": text, "max_tokens": 600} for text in prompts]):
            wait_for_blocks(page, 400)
            shoot(page, "page-10000")


PICTURES = {make.__name__: make for make in (desk, phone, many_blocks)}

if __name__ == "__main__":
    expect.set_options(timeout=MINUTE)
    with sync_playwright() as playwright:
        for name in sys.argv[1:] or PICTURES:
            PICTURES[name](launch(playwright))
