"""Conversations in a real browser: side by side, in the list, stored, and in two tabs."""

import re
import threading

import pytest

from tests.support.soaked import rarely
from tests.web.chatting import answers, box, listed, send, set_setting, speaking
from tests.web.conftest import OpenPage

try:
    from playwright.sync_api import Page, expect
except ModuleNotFoundError:
    pytest.skip("tests of the page want playwright: pip install -r requirements/dev.txt", allow_module_level=True)


# promise: conversations-list-one
def test_conversations_stream_side_by_side_and_one_message_goes_to_all(open_stand_in: OpenPage) -> None:
    with speaking("first", " second") as (llm, url):
        llm.gate = threading.Event()
        page = open_stand_in(url).page
        to_all = page.get_by_role("button", name="Send to all")
        expect(to_all).to_have_count(0)
        send(page, "one")
        page.get_by_role("button", name="New column").click()
        expect(to_all).to_be_disabled()  # a column still answers
        send(page, "two", 1)
        for column in (0, 1):
            expect(answers(page, column).first.locator("> .text")).to_have_text("first")
        expect(page.get_by_role("button", name="Stop")).to_have_count(2)
        llm.gate.set()
        for column, asked in enumerate(("one", "two")):
            expect(answers(page, column).first.locator("> .text")).to_have_text("first second")
            expect(page.locator(".column").nth(column).get_by_role("article").locator("> .text")).to_have_text([asked, "first second"])
        box(page, 1).fill("to both")
        to_all.nth(1).click()
        for column in (0, 1):
            expect(answers(page, column).nth(1).locator("> .text")).to_have_text("first second")
            expect(page.locator(".column").nth(column).locator(".asked").last).to_have_text("to both")
        box(page).fill("by keys")
        box(page).press("Control+Enter")
        expect(answers(page, 1).nth(2).locator("> .text")).to_have_text("first second")
        asked = [llm.prompt(number).rpartition("<user>")[2].removesuffix("<assistant>") for number in range(len(llm.asked))]
        assert asked == ["one", "two", "to both", "to both", "by keys", "by keys"]


# promise: conversations-list-one
def test_a_conversation_is_chosen_renamed_and_deleted_in_the_list(open_stand_in: OpenPage) -> None:
    with speaking("yes") as (_, url):
        page = open_stand_in(url).page
        listing = page.get_by_role("navigation", name="Conversations")
        for text in ("one", "two"):
            listing.get_by_role("button", name="New conversation").first.click()
            send(page, text)
            expect(answers(page).first).to_contain_text("yes")
        expect(listed(page)).to_have_text(["two", "one"])
        listed(page).nth(1).click()
        expect(page.locator(".asked")).to_have_text("one")
        expect(listed(page).nth(1)).to_have_attribute("aria-current", "true")

        page.locator(".conversations li").nth(1).hover()
        listing.get_by_role("button", name="Rename").nth(1).click()
        listing.get_by_label("Name of the conversation").fill("The first")
        listing.get_by_label("Name of the conversation").press("Enter")
        expect(listed(page)).to_have_text(["two", "The first"])
        expect(page.get_by_role("heading", name="The first")).to_be_visible()
        page.reload()
        expect(listed(page)).to_have_text(["two", "The first"])

        page.locator(".conversations li").nth(1).hover()
        listing.get_by_role("button", name="Delete", exact=True).nth(1).click()
        expect(listing).to_contain_text("Deleted “The first”.")
        expect(answers(page)).to_have_count(0)
        page.keyboard.press("Enter")  # Undo has the focus
        expect(page.locator(".asked")).to_have_text("one")
        page.locator(".conversations li").nth(1).hover()
        listing.get_by_role("button", name="Delete", exact=True).nth(1).click()
        page.reload()
        expect(page.get_by_role("heading", name="New conversation")).to_be_visible()
        assert "The first" not in page.evaluate("JSON.stringify(localStorage)")
        page.get_by_role("button", name="Conversations").click()
        expect(listing).to_be_hidden()


def test_a_branch_goes_on_with_what_was_said(page: Page) -> None:
    set_setting(page, "Max tokens", "24")
    send(page, "Once upon a time there was a girl")
    expect(answers(page).first).to_contain_text("24 tokens")
    page.get_by_role("button", name="Branch").click()
    send(page, "The end", 1)
    expect(answers(page, 1)).to_have_count(2)
    expect(answers(page, 1).nth(1)).to_contain_text(re.compile(r"[1-9]\d* of \d+ cached"))
    expect(answers(page, 0)).to_have_count(1)
    page.get_by_role("button", name="Branch").nth(1).click()
    names = [f"{branch}Once upon a time there was a girl" for branch in ("", "Branch: ", "Branch 2: ")]
    expect(page.locator(".column-title")).to_have_text(names)
    page.reload()
    expect(page.locator(".column-title")).to_have_text(names)


# promise: page-two-tabs
@pytest.mark.soak
def test_two_tabs_see_each_others_conversations(open_stand_in: OpenPage) -> None:
    with speaking("yes") as (_, url):
        page = open_stand_in(url).page
        other = page.context.new_page()
        other.goto(url)
        box(page).fill("not sent yet")
        send(other, "one")
        expect(answers(other).first).to_contain_text("yes")
        expect(listed(page)).to_have_text(["one", "New conversation"])
        expect(box(page)).to_have_value("not sent yet")
        listed(page).first.click()
        expect(answers(page).first).to_contain_text("first token after")
        send(other, "two")
        expect(answers(page).nth(1)).to_contain_text("first token after")  # while it is open here
        set_setting(other, "Max tokens", "7")
        expect(page.get_by_label("Max tokens")).to_have_value("7")
        other.locator(".conversations li").first.hover()
        other.get_by_role("button", name="Delete", exact=True).first.click()
        expect(answers(page)).to_have_count(0)
        expect(listed(page)).to_have_text(["New conversation"])


# promise: page-two-tabs
@pytest.mark.soak
def test_where_two_tabs_write_at_once_nothing_is_overwritten(open_stand_in: OpenPage) -> None:
    with speaking("yes", " indeed") as (llm, url):
        page = open_stand_in(url).page
        send(page, "begin")
        expect(answers(page).first).to_contain_text("first token after")
        other = page.context.new_page()
        other.goto(url)
        other.get_by_role("button", name="begin", exact=True).click()
        llm.gate = threading.Event()
        send(page, "here")
        expect(answers(page).nth(1)).to_contain_text("yes")
        expect(other.locator(".asked")).to_have_text(["begin", "here"])
        expect(answers(other).nth(1)).to_contain_text("another tab may still be answering")
        send(other, "there")
        expect(answers(other).nth(2)).to_contain_text("yes")
        llm.gate.set()
        for tab in (page, other):
            expect(tab.get_by_role("button", name="Send")).to_be_visible()
            expect(listed(tab).filter(has_text="begin")).to_have_count(2)
            assert set(listed(tab).all_inner_texts()) == {"Branch: begin", "begin"}  # the later answer is first
        read = "Object.values(localStorage).map((text) => JSON.parse(text).messages?.map(({ content }) => content))"
        said = {tuple(one) for one in page.evaluate(read) if one}
        assert said == {("begin", "yes indeed", "here", "yes indeed"), ("begin", "yes indeed", "here", "", "there", "yes indeed")}


def test_conversations_survive_a_reload_until_all_are_deleted(page: Page) -> None:
    set_setting(page, "Max tokens", "6")
    send(page, "Once upon a time")
    expect(answers(page).first).to_contain_text("6 tokens")
    told = answers(page).first.inner_text()
    page.reload()
    assert answers(page).first.inner_text() == told
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("button", name="Keep them").click()
    expect(answers(page)).to_have_count(1)
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete all").click()
    expect(answers(page)).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).filter(name => name.includes('conversation'))") == []
    page.reload()
    expect(answers(page)).to_have_count(0)


FULL = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }"
DAMAGED = """
const sound = { system: "", sampling: {}, messages: [], updated: 1 };
const wrong = [{ system: 3 }, { name: 3 }, { sampling: null }, { updated: "now" }, { messages: 3 }, { messages: [null] },
  { messages: [{ role: "user", content: 7 }] }, { messages: [{ role: "robot", content: "" }] }];
const texts = ["{", "null", "[]", "7", ...wrong.map((one) => JSON.stringify({ ...sound, ...one }))];
texts.forEach((text, index) => localStorage.setItem(`octavo.conversation.${index}`, text));
"""
DAMAGED_OPEN = "sessionStorage.setItem('octavo.open', '7');"
DAMAGED_NAMES = "sessionStorage.setItem('octavo.open', JSON.stringify([null, 7, ...texts.map((_, index) => String(index))]));"


@pytest.mark.parametrize(
    "broken", [FULL, *rarely(DAMAGED + DAMAGED_OPEN), DAMAGED + DAMAGED_NAMES], ids=["full", "damaged", "damaged and open"]
)
def test_a_store_that_is_full_or_damaged_does_not_stop_the_chat(open_page: OpenPage, server: str, broken: str) -> None:
    page = open_page(server).page
    page.add_init_script(broken)
    page.reload()
    set_setting(page, "Max tokens", "6")
    send(page, "Once upon a time")
    expect(answers(page).first).to_contain_text("6 tokens")
    expect(page.locator(".column")).to_have_count(1)
    expect(listed(page)).to_have_text(["Once upon a time"])
