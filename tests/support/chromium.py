"""The browser that tests of the page drive: this machine's Chromium, by Playwright."""

import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

# The first has no windows: in the others each costs two seconds of CPU time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


def launch(playwright: "Playwright") -> "Browser":
    if CHROMIUM is None:
        pytest.skip("tests of the page want Chromium: apt-get install chromium-headless-shell, or your system's way")
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else [])  # root can have none
