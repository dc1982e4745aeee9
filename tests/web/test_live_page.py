"""The whole page in a real browser before a real `octavo serve`: the chat, its blocks as they come and go, recordings."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess
from tests.support.story_folder import story_folder
from tests.web.conftest import NO_VIEW, OpenPage, address

try:
    from playwright.sync_api import Locator, Page, expect
except ModuleNotFoundError:
    pytest.skip("tests of the page want playwright: pip install -r requirements/dev.txt", allow_module_level=True)

from tests.web.chatting import answers, send, set_setting

BLOCK_SIZE = 4
BLOCKS = 299  # and the null block
QUIET = {"OCTAVO_LOG_LEVEL": "ERROR"}
IN_USE = re.compile(r"^[1-9]\d* of ")
IDLE = re.compile(r"^0 of ")


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(story_folder(tmp_path_factory.mktemp("live") / "stories", end_ids=[]))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded") / "run.ndjson"


@pytest.fixture(scope="module")
def live(stories: str, recording: Path) -> Iterator[str]:
    """A server at which one can look on: a step takes 8 ms and more."""
    flags = ("--max-model-len", "512", "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS + 1))
    env = QUIET | {"OCTAVO_DEBUG": "forward.sleep=8"}
    with ServerProcess("octavo serve", stories, *flags, "--record", str(recording), env=env) as process:
        yield address(process)


def figures(page: Page) -> Locator:
    return page.locator(".pool-figures")


def counts(page: Page) -> dict[str, int]:
    """Blocks by their kind."""
    return {key.get_attribute("data-kind") or "": int(key.text_content() or 0) for key in page.locator(".pool-counts b").all()}


def table(page: Page) -> list[tuple[int, int, str]]:
    """Of the request selected, as far as it is still there: logical number, physical block, text."""
    read = "nodes => nodes.map(node => [node.querySelector('.entry-place').textContent, node.querySelector('.entry-text').textContent])"
    rows = [(*place.split(" → "), text) for place, text in page.locator(".entry").evaluate_all(read)]
    return [(int(index), int(block), text) for index, block, text in rows if "freed at the end" not in text]


def expect_step_after(page: Page, step: int) -> None:
    page.wait_for_function("step => Number(document.querySelector('.timeline').dataset.step) > step", arg=step)


# promise: timeline-of-before
def test_an_answer_is_seen_in_the_pool_as_it_grows_and_what_stays_of_it_is_found_again(open_page: OpenPage, live: str) -> None:
    question = "Once upon a time there was a brave little cat who lived in a big house"
    page = open_page(live).page
    expect(figures(page)).to_have_text(f"0 of {BLOCKS} blocks in use (0.0 %), {BLOCK_SIZE} tokens each")
    set_setting(page, "Max tokens", "4")
    send(page, "Tell me a short story.")
    expect(answers(page).first).to_contain_text("4 tokens")
    expect(page.locator(".request-group", has_text="Ended 1")).to_be_visible()
    expect(page.locator(".pool-welcome")).to_be_hidden()
    cached_before = counts(page)["cached"]
    page.get_by_role("navigation", name="Conversations").get_by_role("button", name="New conversation").first.click()
    set_setting(page, "Max tokens", "120")
    send(page, question)
    answer = answers(page).first
    running = page.locator(".request-group", has_text="Running 1").locator(".request")
    expect(running).to_contain_text(question)
    expect(running).to_contain_text("of at most 120 tokens")
    answer.get_by_role("button", name="Show in the pool").click()
    expect(figures(page)).to_have_text(IN_USE)
    expect(page.locator(".entry").nth(15)).to_be_visible()  # the answer's own blocks, as it takes them
    expect(answer).to_contain_text("120 tokens")
    expect(figures(page)).to_have_text(IDLE)
    prompt = int(re.search(r"0 of (\d+) cached", answer.inner_text())[1])  # type: ignore[index]
    full = (prompt + 120 - 1) // BLOCK_SIZE  # the last token is never computed
    cached = cached_before + full
    assert counts(page) == {"held": 0, "shared": 0, "pinned": 0, "cached": cached, "free": BLOCKS - cached}
    first = table(page)
    assert len(first) == full
    assert [index for index, _, _ in first] == list(range(len({block for _, block, _ in first})))
    written = "".join(text for _, _, text in first)
    said = page.evaluate("JSON.parse(Object.values(localStorage).find(text => text.includes('brave little cat'))).messages[1].content")
    assert question in written and len(written) > len(question) + 50
    assert said.replace("\n", "⏎").startswith(written.partition(question)[2])

    lit = page.locator(".pool").get_attribute("data-lit")
    page.get_by_role("button", name="Regenerate").click()
    kept = (prompt - 1) // BLOCK_SIZE
    expect(answer).to_contain_text(f"{kept * BLOCK_SIZE} of {prompt} cached")
    answer.get_by_role("button", name="Show in the pool").click()
    expect(page.locator(".pool")).not_to_have_attribute("data-lit", lit or "")
    assert table(page)[:kept] == first[:kept]

    expect(figures(page)).to_have_text(IDLE)
    step, hits = page.locator(".timeline-step").inner_text(), page.locator("[data-figure=hits]").inner_text()
    page.reload()
    for tab in (page, open_page(live).page):
        expect(tab.locator(".timeline-step")).to_have_text(step)
        expect(tab.locator("[data-figure=hits]")).to_have_text(hits)


@pytest.mark.soak
def test_time_is_stopped_gone_back_in_and_let_go_while_the_stream_goes_on(open_page: OpenPage, live: str) -> None:
    page = open_page(live).page
    expect(figures(page)).to_have_text(IDLE)
    pool, timeline, slider = page.locator(".pool"), page.locator(".timeline"), page.get_by_label("Moment")
    set_setting(page, "Max tokens", "450")  # a busy browser may take seconds to pause
    send(page, "Lily and her dog went to the park to play")
    expect(page.locator(".pool-news")).to_contain_text("started")
    expect(figures(page)).to_have_text(re.compile(r"^\d\d of "))
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".timeline-moment")).to_contain_text("s ago")
    last = float(slider.get_attribute("max") or 0)

    def seen() -> tuple[str | None, ...]:
        return timeline.get_attribute("data-step"), pool.get_attribute("data-at"), figures(page).inner_text()

    def moved(act: str) -> tuple[str | None, ...]:
        before = timeline.get_attribute("data-step")
        slider.press(act) if act.startswith("Arrow") else page.get_by_role("button", name=act).click()
        expect(timeline).not_to_have_attribute("data-step", before or "")
        return seen()

    visited = [seen()]
    page.wait_for_function("last => document.querySelector('.timeline-slider').max > last + 0.25", arg=last)
    assert seen() == visited[0], "what is looked at stands still"
    visited += [moved("ArrowLeft") for _ in range(3)]
    steps = [int(step or 0) for step, _, _ in visited]
    assert steps == sorted(set(steps), reverse=True)
    assert [moved("One step on"), moved("ArrowRight"), moved("One step on")] == visited[2::-1]
    slider.press("Home")
    expect(figures(page)).to_have_text(IDLE)
    expect(answers(page).first).to_contain_text("450 tokens")
    page.get_by_role("button", name="Live").click()
    expect(page.locator(".timeline-moment")).to_have_text("live")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect_step_after(page, steps[0])
    expect(figures(page)).to_have_text(IDLE)


@pytest.mark.soak
def test_a_recording_shows_the_same_blocks_without_a_server(open_page: OpenPage, live: str, demo: str, recording: Path) -> None:
    page = open_page(live).page
    set_setting(page, "Max tokens", "30")
    send(page, "One day a little bird")
    expect(answers(page).first).to_contain_text("30 tokens")
    expect(figures(page)).to_have_text(IDLE)
    answers(page).first.get_by_role("button", name="Show in the pool").click()
    expect(page.locator(".entry").first).to_be_visible()
    blocks = [block for _, block, _ in table(page)]
    page.wait_for_timeout(200)  # a frame more, for what is written to the file

    replay = open_page(demo).page
    expect(replay.get_by_role("button", name="Start the lesson")).to_be_enabled()
    replay.get_by_label("A recording").set_input_files(recording)
    expect(replay.locator(".timeline-status")).to_have_text("Recording run.ndjson")
    expect(figures(replay)).to_contain_text(f"of {BLOCKS} blocks")
    expect(replay.get_by_role("button", name="Start the lesson")).to_be_hidden()
    replay.get_by_label("Moment").press("End")
    expect(replay.locator(".pool-counts")).to_have_text(page.locator(".pool-counts").text_content() or "")
    expect(figures(replay)).to_have_text(figures(page).text_content() or "")
    assert len(blocks) >= 3
    for block in blocks:
        assert described(replay, block) == described(page, block)


def described(page: Page, block: int) -> list[str]:
    """A block in words, without its age, and its text."""
    go = page.get_by_label("Go to block")
    go.fill(str(block))
    go.press("Enter")
    detail = page.locator(".pool-detail")
    expect(detail).to_contain_text(f"Block {block}: cached")
    return [re.sub(r"for [\d.]+ s; ", "", text) for text in detail.locator("p").all_inner_texts()]


def test_without_the_inspector_the_page_says_so_and_the_chat_works(open_page: OpenPage, stories: str) -> None:
    env = QUIET | {"OCTAVO_DEBUG": "runner=fake"}
    with ServerProcess("octavo serve", stories, "--max-model-len", "256", "--no-inspector", env=env) as process:
        page = open_page(address(process), expected=[NO_VIEW]).page
        expect(page.locator(".pool-status")).to_contain_text("started with --no-inspector")
        set_setting(page, "Max tokens", "8")
        send(page, "Once upon a time")
        expect(answers(page).first).to_contain_text("8 tokens")
