"""The page on a desk and on a phone, light and dark, by keyboard, and read aloud."""

import threading

import pytest

from tests.web.chatting import PHONE, answers, box, listed, scrolls_sideways, send, set_setting, speaking
from tests.web.conftest import OpenPage
from tests.web.layout import SIZES, assert_all_can_be_seen

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Locator, Page, expect
except ModuleNotFoundError:
    pytest.skip("tests of the page want playwright: pip install -r requirements/dev.txt", allow_module_level=True)


# promise: page
@pytest.mark.soak
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_finding_of_axe(open_page: OpenPage, server: str, scheme: str) -> None:
    page = open_page(server, color_scheme=scheme).page
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    set_setting(page, "Max tokens", "6")
    send(page, "Once upon a time")
    expect(answers(page).first).to_contain_text("6 tokens")
    set_setting(page, "Temperature", "9")
    page.get_by_text("Settings").click()
    answers(page).first.locator(".chip").click()
    page.get_by_role("button", name="New column").click()
    page.get_by_role("button", name="Delete all").click()
    for _ in range(2):
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")] == []
        page.keyboard.press("Escape")


def test_the_theme_can_be_chosen_and_is_remembered(open_page: OpenPage, server: str) -> None:
    page = open_page(server, color_scheme="light").page
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(ground) == light


# Those of the frame and the chat, but for what a log and the settings scroll.
CONTROLS = ":is(.masthead button, .part-chat button, .part-chat textarea, .places a):not(.log *, .settings *)"
DESKS = SIZES[:2]


@pytest.mark.soak
def test_nothing_is_cut_off_or_covered_on_a_desk_and_on_a_phone(open_page: OpenPage, server: str) -> None:
    page = open_page(server, viewport=PHONE).page
    set_setting(page, "Max tokens", "60")
    send(page, "Once upon a time")
    expect(answers(page).first).to_contain_text("60 tokens")
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport()
    assert_all_can_be_seen(page, "an answer", controls=CONTROLS)
    page.get_by_text("Settings").click()
    assert_all_can_be_seen(page, "settings", controls=CONTROLS)

    listing, opener = page.get_by_role("navigation", name="Conversations"), page.get_by_role("button", name="Conversations")
    expect(listing).to_be_hidden()
    opener.click()
    expect(listing.get_by_role("button", name="New conversation")).to_be_focused()
    page.keyboard.press("Escape")
    expect(opener).to_be_focused()
    opener.click()
    listed(page).first.click()
    expect(listing).to_be_hidden()

    page.get_by_role("link", name="Timeline").click()
    expect(page.locator("#timeline-title")).to_be_in_viewport()
    expect(page.get_by_role("link", name="Chat", exact=True)).to_be_in_viewport()
    assert_all_can_be_seen(page, "the timeline", controls=CONTROLS, sizes=DESKS)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.get_by_role("button", name="New column").click()
    assert_all_can_be_seen(page, "two columns", controls=CONTROLS, sizes=DESKS)
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    assert scrolls_sideways(page) is False


def test_everything_can_be_done_from_the_keyboard(open_stand_in: OpenPage) -> None:
    with speaking("first", "second") as (llm, url):
        llm.gate = threading.Event()
        page = open_stand_in(url).page
        expect(box(page)).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Enter")
        expect(answers(page).first).to_contain_text("first")
        page.keyboard.press("Escape")
        expect(answers(page).first).to_contain_text("stopped")
        expect(box(page)).to_be_focused()
        tab_to(page, page.get_by_role("button", name="New column"))
        page.keyboard.press("Enter")
        expect(box(page, 1)).to_be_focused()
        tab_to(page, page.get_by_role("button", name="Close this column").nth(1))
        page.keyboard.press("Enter")
        expect(page.locator(".column")).to_have_count(1)
        tab_to(page, page.get_by_role("button", name="New conversation").first)
        page.keyboard.press("Enter")
        expect(answers(page)).to_have_count(0)
        expect(box(page)).to_be_focused()
        tab_to(page, page.get_by_role("navigation", name="Conversations").get_by_role("button", name="one", exact=True))
        page.keyboard.press("Enter")
        expect(answers(page).first).to_contain_text("stopped")


def tab_to(page: Page, wanted: Locator) -> None:
    """Backwards, as the places to go are before where one writes."""
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        if wanted.evaluate("node => node === document.activeElement"):
            return
    raise AssertionError(f"{wanted} cannot be reached")


def test_a_reader_of_the_screen_hears_whole_answers(open_stand_in: OpenPage) -> None:
    with speaking("first", " second") as (llm, url):
        llm.gate = threading.Event()
        page = open_stand_in(url).page
        spoken = page.locator(".part-chat > [role=status]")
        send(page, "Hello")
        expect(answers(page).first).to_contain_text("first")
        expect(spoken).to_have_text("Answering.")
        expect(page.get_by_role("log")).to_have_attribute("aria-live", "off")
        llm.gate.set()
        expect(spoken).to_have_text("Answer: first second")
