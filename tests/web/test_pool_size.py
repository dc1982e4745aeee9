"""The block pool has the space, and nothing that is written moves it: at the sizes of the screens that people have."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.view_frames import ViewModel
from tests.support.view_host import ViewHost, view_host
from tests.web.conftest import OpenPage

try:
    from playwright.sync_api import Page, expect
except ModuleNotFoundError:
    pytest.skip("the page is tested with playwright (requirements/dev.txt)", allow_module_level=True)

if TYPE_CHECKING:
    from playwright.sync_api import ViewportSize

SIZES = ((1024, 768), (1280, 800), (1366, 768), (1440, 900), (1536, 864), (1680, 1050), (1920, 1080))
ALL_OR_SOME = pytest.mark.parametrize("sizes", [SIZES[::6], pytest.param(SIZES, marks=pytest.mark.soak)], ids=["some", "all"])
Sizes = tuple[tuple[int, int], ...]
NUM_BLOCKS = 5824  # what the default model gets in 2 GB
LAID_OUT = """() => {
  const { width, height } = document.querySelector(".grid-cells");
  const { clientWidth, clientHeight } = document.querySelector(".grid-stage");
  return [width, height, clientWidth, clientHeight, document.querySelector(".pool").dataset.cell];
}"""
COVERED = """() => {
  const area = ({ width, height }) => width * height;
  const box = (selector) => document.querySelector(selector).getBoundingClientRect();
  return [area(box(".grid-stage")) / area(box("#pool")), area(box(".grid-stage")) / (innerWidth * innerHeight)];
}"""


@pytest.fixture
def host() -> Iterator[ViewHost]:
    with view_host() as host:
        yield host


def settled(page: Page) -> None:
    page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(resolve, 30))))")


def resize(page: Page, size: tuple[int, int]) -> None:
    viewport: ViewportSize = {"width": size[0], "height": size[1]}
    page.set_viewport_size(viewport)
    page.mouse.move(2, 2)
    settled(page)


def point_at(page: Page, place: int) -> str:
    """What is said of the block at that place of the grid."""
    _, _, width, _, cell = page.evaluate(LAID_OUT)
    columns = width // int(cell)
    page.locator(".grid-marks").hover(position={"x": (place % columns + 0.5) * int(cell), "y": (place // columns + 0.5) * int(cell)})
    settled(page)
    return page.locator(".pool-detail").inner_text()


def words_of(block: int) -> list[str]:
    return [f" wordwordword{block}"] * 16 if block % 3 else [" a"] * 4


def pool_of(host: ViewHost, held: int, cached: int = 0, num_blocks: int = NUM_BLOCKS) -> None:
    """Requests that hold so many blocks, of which some have long texts; and cached blocks."""
    blocks = [[block, int(block <= held), 1, f"{block:016x}", words_of(block), 1.0] for block in range(1, held + cached + 1)]
    tables = [list(range(first, min(first + 15, held + 1))) for first in range(1, held + 1, 15)]
    rows = [
        {"seq": seq, "request": f"cmpl-{seq}", "sample": 0, "samples": 1, "state": "running", "prompt": 9, "tokens": 99, "limit": 900,
         "computed": 98, "cached": 16, "reason": "differs", "preemptions": 0, "from": 0, "table": table}
        for seq, table in enumerate(tables)
    ]  # fmt: skip
    host.send({**ViewModel(1, num_blocks).head(), "block_size": 16}, {"kind": "full", "at": 1.0, "blocks": blocks, "seqs": rows})


# promise: pool-keeps-still
@pytest.mark.soak
def test_pointing_at_a_block_moves_nothing_at_any_size(open_page: OpenPage, host: ViewHost) -> None:
    pool_of(host, held=177)
    page = open_page(f"{host.url}/page", viewport={"width": 1440, "height": 900}, reduced_motion="reduce").page
    expect(page.locator(".pool-figures")).to_contain_text("177 of 5,823 blocks")
    at = 1.0
    for size in SIZES:
        resize(page, size)
        before = page.evaluate(LAID_OUT)
        assert before[:2] == before[2:4], "the canvas is drawn as large as it is shown"
        for place in (0, 4, 29, 30, 176):
            assert point_at(page, place).startswith(f"Block {place + 1}: in use; entry {place % 15} of "), (size, place)
            said = page.locator(".pool-detail .token").count()
            assert said == len(words_of(place + 1)) and page.evaluate(LAID_OUT) == before, (size, place)
        at += 1
        step = [int(at), at, 12.5, 0, 12, 12, 12, 0, 177, 0, 0, 0]
        host.send({"kind": "delta", "at": at, "steps": [step], "events": [[1, at, "evict", 9, ""]]})
        expect(page.locator(".pool")).to_have_attribute("data-at", str(int(at)))
        settled(page)
        assert page.locator(".pool-detail").inner_text().startswith("Block 177: "), "it stays while frames come"
        assert page.evaluate(LAID_OUT) == before, size


# promise: pool-has-the-space
@ALL_OR_SOME
def test_the_grid_covers_the_panel_and_squares_are_as_large_as_fit(open_page: OpenPage, host: ViewHost, sizes: Sizes) -> None:
    pool_of(host, held=177, cached=318)
    page = open_page(f"{host.url}/page", viewport={"width": 1440, "height": 900}).page
    expect(page.locator(".pool-counts")).to_contain_text("cached 318")
    for size in sizes:
        resize(page, size)
        of_panel, of_window = page.evaluate(COVERED)
        assert of_panel > 0.37 and of_window > 0.145, (size, of_panel, of_window)
        _, _, width, height, cell = page.evaluate(LAID_OUT)
        side = int(cell)
        drawn = min(495, (width // side) * (height // side))
        assert side >= 20 and drawn * side**2 > 0.75 * width * height, (size, cell)
        hidden = page.locator(".pool-counts").filter(has_text="have no room here")
        expect(hidden).to_have_count(int(drawn < 495))
        assert drawn == 495 or size[0] < 1440, f"all cached blocks are shown at {size}"
        page.locator(".legend-opener").first.click()
        expect(page.get_by_role("group", name="Legend of the pool")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("group", name="Legend of the pool")).to_be_hidden()
    letters = page.locator(".request-name").evaluate_all("names => names.map((name) => name.getBoundingClientRect().left)")
    assert len(letters) == 12 and len(set(letters)) == 1, "names begin below each other, however wide their letters are"
    assert page.locator(".pool-counts li:not([hidden])").count() == 3, "what is zero is not counted"


# promise: pool-has-the-space
@ALL_OR_SOME
def test_the_lessons_pool_is_eight_by_four(open_page: OpenPage, host: ViewHost, sizes: Sizes) -> None:
    pool_of(host, held=5, num_blocks=33)
    page = open_page(f"{host.url}/page", viewport={"width": 1440, "height": 900}).page
    expect(page.locator(".pool")).to_have_attribute("data-shows", "all")
    layouts = """async () => {
      const { layOut } = await import(new URL("web/pool_layout.js", location));
      const { clientWidth, clientHeight } = document.querySelector(".pool-stage");
      const { columns, rows } = layOut(clientWidth, clientHeight, 33);
      return [columns, rows];
    }"""
    for size in (*sizes, (390, 844)):
        resize(page, size)
        assert page.evaluate(layouts) == [8, 4], size
