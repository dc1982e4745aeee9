"""The lesson in a real browser: played by the engine of `octavo serve --lesson`, and from the recording, with a server and without."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from octavo.server.lesson import OF_STATES, SCENES, Scene
from tests.support.hybrids import hybrid_story_folder
from tests.support.server_process import ServerProcess
from tests.support.story_folder import story_folder
from tests.web.conftest import OpenPage, address
from tests.web.layout import assert_all_can_be_seen

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Locator, Page, Route, expect
except ModuleNotFoundError:
    pytest.skip("tests of the page want playwright: pip install -r requirements/dev.txt", allow_module_level=True)

from tests.web.chatting import PHONE, scrolls_sideways

LAST = len(SCENES)
SCENE_MS = 60_000  # more than any scene takes on a busy machine
IN_USE = re.compile(r"^[1-9]\d* of 32 blocks")
IDLE = re.compile(r"^0 of 32 blocks")
MOVED = "engine 1 is shown from here on"


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = story_folder(tmp_path_factory.mktemp("lesson") / "stories", end_ids=[])
    env = {"OCTAVO_LOG_LEVEL": "ERROR", "OCTAVO_DEBUG": "runner=fake"}
    with ServerProcess("octavo serve", str(folder), "--lesson", "--lesson-pace", "0.02", env=env) as process:
        yield address(process)


def panel(page: Page) -> Locator:
    return page.get_by_role("region", name="Lesson")


def press(page: Page, name: str) -> None:
    panel(page).get_by_role("button", name=name, exact=True).click()


def figures(page: Page) -> Locator:
    return page.locator(".pool-figures")


def expect_scene(page: Page, number: int, scenes: tuple[Scene, ...] = SCENES) -> None:
    """One stepper says where we are, beside the caption, and the marks of the scene are explained."""
    scene = scenes[number - 1]
    expect(panel(page).locator(".lesson-count")).to_have_text(f"{number} of {len(scenes)}")
    expect(panel(page).get_by_role("heading")).to_have_text(scene.title)
    expect(panel(page).locator(".lesson-caption p")).to_have_text(scene.text)
    expect(panel(page).locator(".lesson-marks li")).to_have_count(len(scene.marks))
    expect(panel(page).locator("[aria-current=step]")).to_have_attribute("aria-label", f"Scene {number}: {scene.title}")


def expect_over(page: Page) -> None:
    expect(panel(page).get_by_role("button", name="Play again")).to_be_visible(timeout=SCENE_MS)


def expect_clean(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []
    assert not scrolls_sideways(page)


# promise: lesson-opens
def test_the_engine_plays_scene_after_scene_and_the_page_is_the_lessons(open_page: OpenPage, lesson: str) -> None:
    page = open_page(lesson, expected=["503 .*/v1/view$"]).page  # while engine 0 is started again
    engine = page.get_by_label("Engine", exact=True)  # the lesson is open: this server is there for it
    for number in range(1, LAST + 1):
        expect_scene(page, number)
        expect_over(page)
        expect(engine).to_have_value("1" if number == LAST else "0")  # where the last one goes on
        if number < LAST:
            page.keyboard.press("ArrowRight")
    for _ in range(5):  # a page that is kept from running sees engine 1 when it has nothing to do any more
        if MOVED in page.locator(".pool-news").inner_text():
            break
        press(page, "Play again")
        expect(panel(page).get_by_role("button", name="Pause")).to_be_visible()
        expect_over(page)
    expect(page.locator(".pool-news")).to_contain_text(MOVED)
    expect(figures(page)).to_have_text(IN_USE)  # the last moment of the answer, in engine 1
    press(page, "Scene 1: " + SCENES[0].title)
    expect_over(page)
    expect(engine).to_have_value("0")
    press(page, f"Scene {LAST}: " + SCENES[-1].title)
    expect_over(page)
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.get_by_role("link", name="Chat")).to_be_hidden()

    press(page, "Finish")
    expect(panel(page)).to_be_hidden()
    expect(page.locator("#chat")).to_be_visible()
    expect(page.get_by_role("button", name="Lesson", exact=True)).to_be_focused()
    expect(figures(page)).to_have_text(IDLE)  # it is live again
    expect(engine).to_have_value("0")


# promise: lesson-states
def test_the_page_shows_the_state_slots_in_the_scene_about_them(open_page: OpenPage, tmp_path: Path) -> None:
    env = {"OCTAVO_LOG_LEVEL": "ERROR", "OCTAVO_DEBUG": "runner=fake"}
    folder, flags = str(hybrid_story_folder(tmp_path / "model")), ("--load-format", "dummy", "--lesson", "--lesson-pace", "0.02")
    with ServerProcess("octavo serve", folder, *flags, env=env) as process:
        page = open_page(address(process)).page
        press(page, f"Scene {LAST}: {OF_STATES.title}")
        expect_scene(page, LAST, (*SCENES[:-1], OF_STATES, SCENES[-1]))
        expect_over(page)
        expect(page.locator(".pool-states")).to_have_text(re.compile(r"^State slots \d+ *live [12] *checkpoints [1-9]"))
        assert_all_can_be_seen(page, "the scene about states")
        expect_clean(page)


def test_a_scene_can_be_paused_and_one_that_is_left_is_ended(open_page: OpenPage, lesson: str) -> None:
    page = open_page(lesson).page
    page.route("**/v1/lesson/6", lambda route: None)  # this scene is never over
    left = {"predicate": lambda request: request.url.endswith("/v1/lesson/6")}
    expect_scene(page, 1)
    for leave in ("Previous", "Close the lesson"):
        press(page, "Scene 6: " + SCENES[5].title)
        press(page, "Pause")
        expect(page.get_by_role("button", name=re.compile("^(Play|Pause|Resume)"))).to_have_text(["Play"])  # and none in the timeline
        press(page, "Play")
        with page.expect_event("requestfailed", **left):  # the server sees that the client is gone, and ends the scene
            press(page, leave)
    expect(figures(page)).to_have_text(IDLE)


@pytest.mark.soak
def test_a_scene_ends_where_the_stream_tells_its_end_though_the_answer_comes_first(open_page: OpenPage, lesson: str) -> None:
    def answer_at_once(route: Route) -> None:
        real = Request(route.request.url, method="POST")
        threading.Thread(target=lambda: urlopen(real).close()).start()
        route.fulfill(json={"scene": 2, "status": "over"})

    page = open_page(lesson).page
    expect_over(page)
    page.route("**/v1/lesson/2", answer_at_once)
    press(page, "Scene 2: " + SCENES[1].title)
    expect_over(page)
    expect(figures(page)).to_have_text(re.compile("^[45] of 32 blocks"))  # of up to 68 tokens; the scene before has three


AT_ONCE = "(blocks, keys) => keys.forEach((key) => blocks.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true })))"


# promise: lesson-page-itself
def test_the_demo_says_what_octavo_is_and_tells_the_lesson_without_a_server(open_page: OpenPage, demo: str) -> None:
    """Nothing is asked of a server: a request that fails is an error on the console, and ends the test."""
    page = open_page(demo).page
    start = page.get_by_role("button", name="Start the lesson")
    expect(page.get_by_role("heading", name="An LLM engine that shows its memory")).to_be_visible()
    expect(page.get_by_role("link", name="Run it on your own machine")).to_have_attribute("href", "../../README.md")
    expect(page.get_by_text("make serve")).to_be_visible()
    expect(page.get_by_placeholder("Ask something")).to_have_count(0)
    expect(figures(page)).to_have_text(IN_USE)
    assert_all_can_be_seen(page, "the demo's opening")
    start.click()
    expect_scene(page, 1)
    expect_over(page)
    assert_all_can_be_seen(page, "a scene")
    expect(figures(page)).to_have_text(re.compile("^3 of 32 blocks"))  # it stands still while its blocks are in use
    for number in range(2, LAST + 1):
        page.keyboard.press("ArrowRight")
        expect_scene(page, number)
    page.keyboard.press("ArrowLeft")
    expect_scene(page, LAST - 1)
    blocks = page.get_by_role("application", name="Blocks of the pool")
    blocks.press("ArrowRight")  # goes from block to block, not from scene to scene
    blocks.press("Enter")
    blocks.press("Escape")  # ends the selection first
    expect_scene(page, LAST - 1)
    blocks.evaluate(AT_ONCE, ["Enter", "Escape"])  # also before what is selected was drawn
    page.keyboard.press("Escape")
    expect(panel(page)).to_be_hidden()
    expect(start).to_be_focused()


@pytest.mark.soak
@pytest.mark.parametrize(("scheme", "size"), [("light", {"width": 1024, "height": 768}), ("dark", PHONE)], ids=["light", "dark phone"])
def test_everybody_can_follow_the_lesson(open_page: OpenPage, demo: str, scheme: str, size: dict[str, int]) -> None:
    page = open_page(demo, color_scheme=scheme, viewport=size, reduced_motion="reduce").page
    start = page.get_by_role("button", name="Start the lesson")
    expect(start).to_be_in_viewport()
    expect(figures(page)).to_have_text(IN_USE)
    expect_clean(page)
    start.click()
    press(page, "Scene 4: " + SCENES[3].title)
    expect_scene(page, 4)
    expect(figures(page)).to_have_text(IN_USE)
    press(page, "Pause")
    expect(panel(page).get_by_role("button", name="Next")).to_be_in_viewport(ratio=1)
    expect(panel(page).get_by_role("heading")).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("application", name="Blocks of the pool")).to_be_in_viewport()
    expect_clean(page)
