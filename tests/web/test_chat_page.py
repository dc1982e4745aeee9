"""The chat in a real browser: what a user does and sees, and that nothing a model says does anything."""

import asyncio
import re
import shutil
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from octavo.engine.async_llm import Ask
from octavo.engine.wire import SequenceState, ViewFrame
from octavo.errors import OverloadError, RequestError
from octavo.outputs import TextDelta
from octavo.server.app import build_app
from octavo.server.state import Server
from octavo.server.web import FOLDER
from octavo.server_config import ServerConfig
from tests.support.http_server import HttpServer
from tests.support.stand_in_llm import TEMPLATE, StandInLLM
from tests.web.conftest import NO_VIEW, OpenPage, Watched, plain_files
from tests.web.layout import SIZES, assert_all_can_be_seen

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Locator, Page, expect
except ModuleNotFoundError:
    pytest.skip("tests of the page want playwright: pip install -r requirements/dev.txt", allow_module_level=True)

PHONE = {"width": 390, "height": 844}
STATUS = "Failed to load resource: the server responded with a status of"  # how Chromium tells of an answer that is an error
HOSTILE = """<script>window.struck = 1</script> <img src=x onerror="window.struck = 2">

<iframe src="https://example.org/"></iframe><svg onload="window.struck = 3">

[a](javascript:window.struck=4) [b](data:text/html,<script>window.struck=5</script>) ![c](https://example.org/c.png) [d](https://example.org/d)

<a href="javascript:window.struck=6">e</a> &lt;script&gt; `</code><script>window.struck = 7</script>` abc\u202egnitirw\u202c \u2066x\u2069

| <b onclick=1>f</b> | g |
|---|---|
| <style>body{display:none}</style> | </table><script>window.struck = 8</script> |

```<script>
</pre><script>window.struck = 9</script>
```
"""


class Speaker(StandInLLM):
    """Says what it was told to; `held` holds it back before the first piece until it is set, `gate` after it. Its view shows `row`."""

    pieces: tuple[str, ...] = ()
    held: threading.Event | None = None
    gate: threading.Event | None = None
    row: SequenceState | None = None

    template = "{% if messages[0].role != 'system' %}<system>You are Speaker.{% endif %}" + TEMPLATE

    async def view(self, engine: int = 0) -> AsyncIterator[ViewFrame]:
        yield ViewFrame(True, 0.0, 0.0)
        for number in count(1):
            await asyncio.sleep(0.05)
            yield ViewFrame(False, number / 20, 0.0, seqs=[self.row] if self.row is not None else [])

    async def _answer(self, ask: Ask) -> AsyncGenerator[list[TextDelta], None]:
        while self.held is not None and not self.held.is_set():
            await asyncio.sleep(0.01)
        for number, piece in enumerate(self.pieces):
            while number and self.gate is not None and not self.gate.is_set():
                await asyncio.sleep(0.01)
            yield [TextDelta("r", 0, piece, [7], "stop" if number == len(self.pieces) - 1 else None)]  # type: ignore[arg-type]


@contextmanager
def speaking(*pieces: str, config: ServerConfig | None = None) -> Iterator[tuple[Speaker, str]]:
    llm = Speaker()
    llm.pieces = pieces
    state = Server(llm, config or ServerConfig(inspector=False), "speaker")  # type: ignore[arg-type]
    with HttpServer(build_app(state)) as server:
        try:
            yield llm, server.url
        finally:
            state.draining = True  # ends the view of a page that is still open
            for event in (llm.held, llm.gate):
                if event is not None:
                    event.set()  # else what still streams would hold the server's end up


@pytest.fixture
def open_stand_in(open_page: OpenPage) -> OpenPage:
    """`speaking` has no view."""

    def open_one(url: str, expected: list[str] | None = None, **settings: object) -> Watched:
        return open_page(url, [NO_VIEW, *(expected or [])], **settings)

    return open_one


def box(page: Page, column: int = 0) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True).nth(column)


def send(page: Page, text: str, column: int = 0) -> None:
    box(page, column).fill(text)
    box(page, column).press("Enter")


def answers(page: Page, column: int = 0) -> Locator:
    return page.locator(".column").nth(column).get_by_role("article", name="Answer")


def listed(page: Page) -> Locator:
    return page.locator(".conversations .opener")


def set_setting(page: Page, label: str, value: str, column: int = 0) -> None:
    place = page.locator(".column").nth(column)
    place.get_by_text("Settings").click()
    place.get_by_label(label).fill(value)
    place.get_by_label(label).press("Tab")
    place.get_by_text("Settings").click()


# promise: page
def test_a_question_is_answered_with_its_figures_and_what_the_cache_gave(page: Page) -> None:
    expect(page.locator("#about")).to_contain_text("stories · 512 tokens of context")
    said = "The server reads what you send, and people who may watch its block pool can see the text."
    expect(page.locator(".empty")).to_have_text(f"Conversations are stored only in this browser. {said}")
    set_setting(page, "Max tokens", "40")
    send(page, f"{time.time_ns() % 10**9} brave little cats lived in a house")  # which nobody has asked this server before
    first = answers(page).first
    expect(first).to_contain_text(re.compile(r"40 tokens · [\d.]+ tokens/s · first token after [\d.]+ m?s · max tokens reached"))
    chip, reason = first.get_by_role("button", name=re.compile(r"^0 of \d+ cached$")), first.get_by_role("tooltip")
    expect(reason).to_be_hidden()
    chip.hover()
    expect(reason).to_have_text(re.compile(r"0 of \d+ prompt tokens came from the cache\. No earlier prompt begins like this one\."))
    chip.click()
    page.mouse.move(0, 0)
    expect(reason).to_be_visible()
    chip.click()
    page.mouse.move(0, 0)
    expect(reason).to_be_hidden()
    send(page, "And then")
    second = answers(page).nth(1)
    expect(second).to_contain_text("cached")
    cached, prompt = map(int, re.search(r"(\d+) of (\d+) cached", second.inner_text()).groups())  # type: ignore[union-attr]
    assert prompt > cached > 40
    assert len(first.locator("> .text").inner_text()) > 20


def test_an_answer_shows_its_request_in_the_pool(page: Page) -> None:
    set_setting(page, "Max tokens", "8")
    send(page, "Once upon a time")
    show = page.get_by_role("button", name="Show in the pool")
    expect(show).to_have_attribute("aria-pressed", "false")
    show.click()
    expect(show).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#pool")).to_contain_text(re.compile(r"Block table of sequence \d+: [1-9]"))


def test_without_the_inspector_there_is_the_chat_and_a_word_on_the_rest(open_stand_in: OpenPage) -> None:
    with speaking("yes") as (_, url):
        page = open_stand_in(url).page
        expect(page.locator("#pool")).to_contain_text("--no-inspector")
        send(page, "Hello")
        expect(answers(page).first).to_contain_text("yes")


def test_regenerate_and_edit_ask_again_for_the_last_message(page: Page) -> None:
    set_setting(page, "Max tokens", "8")
    send(page, "Once upon a time")
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page)).to_have_count(1)
    expect(answers(page).first).to_contain_text("8 tokens")
    page.get_by_role("button", name="Edit").click()
    expect(box(page)).to_have_value("Once upon a time")
    send(page, "Lily saw a dog")
    expect(answers(page).first).to_contain_text("8 tokens")
    assert page.locator(".asked").all_inner_texts() == ["Lily saw a dog"]


def test_settings_show_the_defaults_go_to_the_model_and_say_beside_the_field_what_is_out_of_range(open_stand_in: OpenPage) -> None:
    with speaking("yes") as (llm, url):
        llm.sampling_defaults.update(temperature=0.2, top_p=0.95)
        page = open_stand_in(url).page
        sampling = {"Temperature": "0.2", "Top p": "0.95", "Max tokens": "rest of context", "Seed": "random"}
        for label, value in {**sampling, "System prompt": "You are Speaker."}.items():
            expect(page.get_by_label(label)).to_have_attribute("placeholder", value)
        expect(page.locator(".settings")).to_contain_text("256 tokens")
        given = {"Temperature": "0.5", "Top p": "0.9", "Max tokens": "7", "Seed": "11", "System prompt": "Be brief."}
        for label, value in given.items():
            set_setting(page, label, value)
        wrong = {"Temperature": "2.5", "Top p": "0", "Max tokens": "257", "Seed": "1.5"}
        for label, value in wrong.items():
            set_setting(page, label, value)
            assert not page.get_by_label(label).evaluate("node => node === document.activeElement")
        page.get_by_text("Settings").click()
        said = ["from 0 to 2", "above 0 and at most 1", "a whole number from 1 to 256", "a whole number of at least 0"]
        expect(page.locator(".numbers .trouble")).to_have_text([f"Not used: must be {range_}." for range_ in said])
        send(page, "Hello")
        expect(answers(page).first).to_contain_text("yes")
        (ask,) = llm.asked
        assert (ask.params.temperature, ask.params.top_p, ask.params.max_tokens, ask.params.seed) == (0.5, 0.9, 7, 11)
        assert ask.prompt == "<system>Be brief.<user>Hello"
        page.get_by_label("Temperature").fill("0.7")
        expect(page.locator(".numbers .trouble").first).to_be_empty()


# promise: page-says-what
def test_until_the_first_token_the_page_says_what_the_request_waits_for(open_page: OpenPage) -> None:
    with speaking("yes", config=ServerConfig()) as (llm, url):
        llm.held = threading.Event()
        page = open_page(url, expected=[f"{STATUS} 503", "ERR_CONNECTION"]).page  # once the server ends, before the page does
        sign = page.locator(".waiting")
        page.wait_for_function("() => document.querySelector('.pool-figures').textContent")  # the view has begun
        send(page, "Hello")
        expect(page.locator(".asked")).to_have_text("Hello")
        expect(sign).to_have_text(re.compile("^Waiting for the first token"))
        llm.row = SequenceState(5, "r", 0, 1, "waiting", 3000, 3000, 3100, 0, 0, "", 0, 0, [])
        expect(sign).to_have_text(re.compile("^Waiting in the queue · \\d+ s$"))
        llm.row = replace(llm.row, state="running", computed=2048)
        expect(sign).to_have_text(re.compile(r"^Reading the prompt: 2,048 of 3,000 tokens · \d+ s$"))
        llm.held.set()
        expect(answers(page).first.locator("> .text")).to_have_text("yes")
        expect(sign).to_be_hidden()


def test_stop_ends_the_answer_and_the_request(open_stand_in: OpenPage) -> None:
    with speaking("first", "second") as (llm, url):
        llm.gate = threading.Event()
        page = open_stand_in(url).page
        send(page, "Hello")
        expect(answers(page).first).to_contain_text("first")
        page.get_by_role("button", name="Stop").click()
        expect(answers(page).first).to_contain_text("1 token · first token after")
        expect(answers(page).first).to_contain_text("stopped")
        assert "second" not in page.content()
        request = page.evaluate("JSON.parse(Object.values(localStorage)[0]).messages[1].request")
        deadline = time.monotonic() + 60  # nothing more is being said, so that it takes the server a moment to see that nobody listens
        read = "id => fetch('./v1/requests/' + id).then(answer => answer.json())"
        while (record := page.evaluate(read, request))["state"] != "finished":
            assert time.monotonic() < deadline, record
            page.wait_for_timeout(100)
        assert record["prompts"][0]["samples"][0]["finish_reason"] == "abort"
        page.get_by_role("button", name="Send").wait_for()


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
        asked = [str(ask.prompt).rpartition("<user>")[2] for ask in llm.asked]
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


@pytest.mark.parametrize("broken", [FULL, DAMAGED + DAMAGED_OPEN, DAMAGED + DAMAGED_NAMES], ids=["full", "damaged", "damaged and open"])
def test_a_store_that_is_full_or_damaged_does_not_stop_the_chat(open_page: OpenPage, server: str, broken: str) -> None:
    page = open_page(server).page
    page.add_init_script(broken)
    page.reload()
    set_setting(page, "Max tokens", "6")
    send(page, "Once upon a time")
    expect(answers(page).first).to_contain_text("6 tokens")
    expect(page.locator(".column")).to_have_count(1)
    expect(listed(page)).to_have_text(["Once upon a time"])


# promise: page-asks-key
def test_the_key_is_asked_for_kept_in_this_tab_and_sent_in_a_header(open_stand_in: OpenPage) -> None:
    with speaking("yes", config=ServerConfig(api_key=("right",), inspector=False)) as (_, url):
        watched = open_stand_in(url, expected=[f"{STATUS} 401"])
        page = watched.page
        seen: list[str] = []
        page.on("request", lambda request: seen.append(request.url))
        question = page.get_by_role("dialog")
        for wrong, said in (("wrong", "The API key is not valid."), ("wröng", "ASCII only")):
            question.get_by_label("API key").fill(wrong)
            question.get_by_role("button", name="Use this key").click()
            expect(question.get_by_role("alert")).to_contain_text(said)
            expect(question.get_by_label("API key")).to_be_focused()
        question.get_by_label("API key").fill("right")
        question.get_by_label("API key").press("Enter")
        expect(question).to_have_count(0)
        send(page, "Hello")
        expect(answers(page).first).to_contain_text("yes")
        page.reload()
        expect(page.locator("#about")).to_contain_text("speaker")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert page.evaluate("sessionStorage.getItem('octavo.key')") == "right"
        assert "right" not in page.evaluate("JSON.stringify(localStorage)") and not [url for url in seen if "right" in url]
        page.get_by_role("button", name="Forget key").click()
        expect(page.get_by_role("dialog")).to_be_visible()


def test_an_error_is_shown_as_the_server_says_it_and_one_that_passes_can_be_tried_again(open_stand_in: OpenPage) -> None:
    with speaking("yes") as (llm, url):
        llm.trouble = 0, OverloadError("there are <b>too many</b>", 7.0)
        page = open_stand_in(url, expected=[f"{STATUS} (429|400)"]).page
        send(page, "Hello")
        expect(page.get_by_role("alert")).to_contain_text("there are <b>too many</b> (429")
        expect(page.get_by_role("alert")).to_contain_text("The server asks to wait 7 s.")
        llm.trouble = None
        page.get_by_role("button", name="Try again").click()
        expect(answers(page).first).to_contain_text("yes")
        llm.trouble = 0, RequestError("it is far too long", "messages", "context_length_exceeded")
        send(page, "Again")
        expect(page.get_by_role("alert")).to_contain_text("it is far too long (400, context_length_exceeded)")


def test_the_page_waits_for_a_server_that_loads(open_stand_in: OpenPage) -> None:
    with speaking("yes") as (llm, url):
        llm.state = "loading"
        page = open_stand_in(url, expected=[f"{STATUS} 503"]).page
        expect(page.locator("#state")).to_have_text("The model is loading …")
        llm.state = "ready"
        expect(page.locator("#state")).to_have_text("")
        expect(page.locator("#about")).to_contain_text("speaker")


def test_a_host_of_plain_files_shows_the_page_without_the_chat(open_page: OpenPage, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "some/place/web")
    shutil.copy(FOLDER / "index.html", tmp_path / "some/place")
    with plain_files(tmp_path) as url:
        page = open_page(f"{url}/some/place/", expected=[NO_VIEW, f"{STATUS} 404 .*/health$"]).page
        expect(page.locator("#state")).to_have_text("There is no server behind this page: the chat needs one.")
        expect(page.locator("#chat")).to_be_hidden()
        expect(page.get_by_role("region", name="Lesson")).to_contain_text("1 of 10")


# promise: page
def test_what_a_model_says_is_inert(open_stand_in: OpenPage) -> None:
    with speaking(*HOSTILE.splitlines(keepends=True)) as (_, url):
        page = open_stand_in(url, permissions=["clipboard-read", "clipboard-write"]).page
        send(page, HOSTILE)
        answer = answers(page).first
        expect(answer).to_contain_text("first token after")
        made = set(answer.locator(".text *").evaluate_all("nodes => nodes.map(node => node.tagName.toLowerCase())"))
        assert made <= {"p", "a", "code", "pre", "div", "span", "button", "table", "thead", "tbody", "tr", "th", "td"}
        answer.locator(".text").get_by_role("button", name="Copy").click()
        expect(answer.locator(".text button")).to_have_text(["Copied"])
        assert page.evaluate("navigator.clipboard.readText()") == "</pre><script>window.struck = 9</script>"
        assert page.evaluate("window.struck") is None and page.locator("script").count() == 2
        links = answer.locator(".text a")
        assert links.evaluate_all("nodes => nodes.map(node => [node.href, node.rel])") == [
            ["https://example.org/c.png", "noopener noreferrer nofollow"],
            ["https://example.org/d", "noopener noreferrer nofollow"],
        ]
        for text in ("<script>window.struck = 1</script>", "javascript:window.struck=4", "⟨U+202E⟩gnitirw⟨U+202C⟩", "</pre><script>"):
            expect(answer).to_contain_text(text)
        page.reload()
        expect(answers(page).first).to_contain_text("<script>window.struck = 1</script>")
        assert page.evaluate("window.struck") is None


@pytest.mark.parametrize("piece", ["x" * 1000, "> " * 500, "[" * 1000, "**a _b " * 150], ids=["line", "quotes", "brackets", "emphasis"])
def test_a_megabyte_of_anything_leaves_the_page_usable(open_stand_in: OpenPage, piece: str) -> None:
    with speaking(*[piece] * 1000) as (_, url):
        page = open_stand_in(url, viewport=PHONE).page
        send(page, "Hello")
        expect(answers(page).first).to_contain_text("more characters are not shown")
        expect(answers(page).first).to_contain_text("first token after")
        assert scrolls_sideways(page) is False
        page.get_by_role("button", name="New column").click()
        send(page, "Hello", 1)
        expect(answers(page, 1).first).to_contain_text("xx" if piece[0] == "x" else piece[0])


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def test_thinking_is_folded(open_stand_in: OpenPage) -> None:
    with speaking("<think>hidden depths", "</think>", "shown", config=ServerConfig(reasoning_parser="think", inspector=False)) as (_, url):
        page = open_stand_in(url).page
        send(page, "Hello")
        expect(answers(page).first.locator("> .text")).to_have_text("shown")
        thought = page.get_by_text("hidden depths")
        expect(thought).to_be_hidden()
        page.get_by_text("Thinking").click()
        expect(thought).to_be_visible()


# promise: page
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


# promise: page
@pytest.mark.timed("the first paint")
def test_first_paint_comes_within_a_second(page: Page, record_property: Callable[[str, object], None]) -> None:
    page.context.new_cdp_session(page).send("Network.setCacheDisabled", {"cacheDisabled": True})
    painted: list[int] = []
    while min(painted, default=1000) >= 1000 and len(painted) < 20:  # the machine may have been busy with something else
        page.reload()
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
        painted.append(round(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")))
    record_property("first paint in ms", painted)
    assert min(painted) < 1000


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
