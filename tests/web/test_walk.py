"""What a newcomer sees on the way through the page, in the sizes that screens have, light and dark."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.server_process import ServerProcess
from tests.support.story_folder import story_folder
from tests.web.conftest import OpenPage, address
from tests.web.layout import assert_all_can_be_seen

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Page, expect
except ModuleNotFoundError:
    pytest.skip("tests of the page want playwright: pip install -r requirements/dev.txt", allow_module_level=True)

from tests.web import walk
from tests.web.chatting import PHONE

if TYPE_CHECKING:
    from playwright.sync_api import ViewportSize

DESKS = ((1024, 768), (1280, 800), (1366, 768), (1440, 900), (1536, 864), (1680, 1050), (1920, 1080))
ALL_OR_SOME = pytest.mark.parametrize("sizes", [DESKS[::6], pytest.param(DESKS, marks=pytest.mark.soak)], ids=["some", "all"])
ALL_RULES: dict[str, Any] = {"resultTypes": ["violations"], "preload": False}
SCHEMES = {"light": ALL_RULES, "dark": ALL_RULES | {"runOnly": ["color-contrast"]}}
RULES = "Once upon a time there was a little girl named Lily. She loved to play outside with her big red ball."
# Those of the frame and the chat, but for what a log and the settings scroll; a phone scrolls from part to part.
CONTROLS = ":is(.masthead button, .part-chat button, .part-chat textarea):not(.log *, .settings *)"
PLACES = ".masthead button, .places a"
ON_PHONE = ((390, 844),)
SCROLLED = ("phone: timeline", "phone: chat", "phone: block pool")  # the same page as at the stops before, for axe
GROUND = "getComputedStyle(document.body).backgroundColor"
LAID_OUT = """() => {
  const box = (selector) => Object.values(document.querySelector(selector).getBoundingClientRect().toJSON());
  const { cell, shows } = document.querySelector(".pool").dataset;
  return [cell, shows, ...[".grid-cells", ".grid-stage", ".pool-side", ".pool-reading", "#timeline", "#chat"].map(box)];
}"""
SHARE = """() => {
  const { width, height } = document.querySelector(".grid-stage").getBoundingClientRect();
  const { clientWidth, clientHeight } = document.querySelector("#pool");
  return (width * height) / (clientWidth * clientHeight);
}"""


@pytest.fixture(scope="module")
def museum(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose answers have 24 tokens unless asked for more, and so slow that twelve requests run as long as one looks."""
    folder = story_folder(tmp_path_factory.mktemp("walk") / "stories", end_ids=[])
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 24}))
    flags = ("--max-model-len", "512", "--block-size", "8", "--num-gpu-blocks-override", "5824")
    env = {"OCTAVO_LOG_LEVEL": "ERROR", "OCTAVO_DEBUG": "forward.sleep=100"}
    with ServerProcess("octavo serve", str(folder), *flags, env=env) as process:
        yield address(process)


def settled(page: Page) -> None:
    page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(resolve, 30))))")


def resize(page: Page, size: tuple[int, int]) -> None:
    viewport: ViewportSize = {"width": size[0], "height": size[1]}
    page.set_viewport_size(viewport)
    page.mouse.move(2, 2)
    settled(page)


def look_around(page: Page, stop: str, controls: str, sizes: tuple[tuple[int, int], ...]) -> None:
    """At all sizes nothing is cut off or covered, and in both schemes, which change only colours, axe finds nothing serious."""
    grounds = set()
    assert_all_can_be_seen(page, stop, controls=controls, sizes=sizes)
    for scheme, options in SCHEMES.items():
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found = Axe().run(page, options=options).response["violations"]
        assert [(stop, one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []
        grounds.add(page.evaluate(GROUND))
    assert len(grounds) == len(SCHEMES)


def hover_everywhere(page: Page, sizes: tuple[tuple[int, int], ...]) -> None:
    """At each size the grid has the panel, and pointing at its blocks changes what is written about them and nothing else.

    Time stands still meanwhile: twelve requests take more blocks, for which squares become smaller.
    """
    page.get_by_role("button", name="Pause").click()
    for size in sizes:
        resize(page, size)
        assert page.evaluate(SHARE) > 0.35, size
        before, said = page.evaluate(LAID_OUT), set()
        wide, side = page.evaluate(walk.GRID)
        for place in (0, 7, 14, 28):
            column, row = place % int(wide / side), place // int(wide / side)
            page.locator(".grid-marks").hover(position={"x": (column + 0.5) * side, "y": (row + 0.5) * side})
            settled(page)
            said.add(page.locator(".pool-detail").inner_text().partition(";")[0])
            assert page.evaluate(LAID_OUT) == before, (size, place)
        assert len(said) == 4 and all(text.startswith("Block ") for text in said), (size, said)
        walk.agree(page)
    page.get_by_role("button", name="Live").click()


# promise: page-walk, pool-keeps-still, timeline-of-before
@ALL_OR_SOME
def test_at_a_desk_a_newcomer_finds_all_in_sight_and_in_its_place(
    open_page: OpenPage, museum: str, sizes: tuple[tuple[int, int], ...]
) -> None:
    page = open_page(museum, viewport={"width": 1440, "height": 900}).page

    def look(stop: str) -> None:
        if stop == "shared blocks":
            hover_everywhere(page, sizes)
            page.set_viewport_size({"width": 1440, "height": 900})
        look_around(page, stop, CONTROLS, sizes)

    walk.on_a_desk(page, museum, look, RULES)


# promise: page-walk, page-phone
def test_on_a_phone_too(open_page: OpenPage, museum: str) -> None:
    page = open_page(museum, viewport=PHONE, has_touch=True, is_mobile=True).page

    def look(stop: str) -> None:
        if stop in SCROLLED:
            assert_all_can_be_seen(page, stop, controls=PLACES, sizes=ON_PHONE)
        else:
            look_around(page, stop, PLACES, ON_PHONE)

    walk.on_a_phone(page, museum, look, RULES)
    expect(page.locator(".pool-detail")).to_have_text("Tap a block to read what is in it.")
