"""Reports in a real browser: nothing is asked for, nothing is complained about, and everybody can read them."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import octavo
from tests.support.chromium import launch
from tests.support.report_file import HOSTILE
from tests.support.scripted_server import ScriptedServer, spoken


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("reports")
    assert octavo("plan", "--memory", "2g", "--report", str(folder / "plan.html")).returncode == 0
    with ScriptedServer(lambda _body: spoken(0, 0.01, 0.01), models=(HOSTILE,)) as server:
        words = ("--num-prompts", "6", "--output-len", "3", "--slo", "ttft:1s", "--report", str(folder / "serve.html"))
        assert octavo("bench", "serve", "--url", server.url, *words).returncode == 0
    return sorted(folder.glob("*.html"))


# promise: octavo-plan-octavo
def test_a_report_opens_in_a_browser(reports: list[Path]) -> None:
    """In a wide window by day, in a narrow one by night."""
    pytest.importorskip("axe_playwright_python", reason="wants Playwright and axe: pip install -r requirements/dev.txt")
    with ThreadPoolExecutor(1) as thread:  # Playwright keeps the loop of its thread for itself, and other tests have theirs here
        looks = (("light", 1200), ("dark", 360))
        windows = [{"color_scheme": scheme, "viewport": {"width": width, "height": 800}} for scheme, width in looks]
        seen = thread.submit(looked_at, reports, windows).result()
    assert [one["title"] for one in seen] == 2 * ["SmolLM2-135M-Instruct", HOSTILE]
    for report, one in zip(2 * reports, seen, strict=True):
        assert one["violations"] == [] and one["heard"] == [] and one["asked"] == [report.as_uri()]
        assert one["fits"], "it scrolls sideways"
        assert len(one["heights"]) >= 2 and min(one["heights"]) > 20


def looked_at(reports: list[Path], windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Browser, sync_playwright

    def look(browser: Browser, report: Path, options: dict[str, Any]) -> dict[str, Any]:
        view, heard, asked = browser.new_page(**options), list[str](), list[str]()
        view.on("console", lambda message: heard.append(message.text))
        view.on("pageerror", lambda error: heard.append(str(error)))
        view.on("request", lambda request: asked.append(request.url))
        view.goto(report.as_uri())
        found = Axe().run(view).response["violations"]
        return {
            "title": view.locator("h1").inner_text(),
            "fits": view.evaluate("document.documentElement.scrollWidth <= innerWidth"),
            "heights": view.evaluate("[...document.querySelectorAll('svg')].map(drawn => drawn.getBoundingClientRect().height)"),
            "violations": [json.dumps(one)[:2000] for one in found if one["impact"] in ("serious", "critical")],
            "heard": heard,
            "asked": asked,
        }

    with sync_playwright() as started:
        browser = launch(started)
        return [look(browser, report, options) for options in windows for report in reports]
