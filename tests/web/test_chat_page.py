"""The chat in a real browser: what a user asks, what is answered, and what is said when there is no answer."""

import re
import threading
import time
from dataclasses import replace

import pytest

from octavo.errors import OverloadError, RequestError
from octavo.inspector.frames import SequenceState
from octavo.server_config import ServerConfig
from tests.web.chatting import STATUS, answers, box, send, set_setting, speaking
from tests.web.conftest import OpenPage

try:
    from playwright.sync_api import Page, expect
except ModuleNotFoundError:
    pytest.skip("tests of the page want playwright: pip install -r requirements/dev.txt", allow_module_level=True)


# promise: page
def test_a_question_is_answered_with_its_figures_and_what_the_cache_gave(page: Page) -> None:
    expect(page.locator("#about")).to_contain_text("stories · 512 tokens of context")
    set_setting(page, "Max tokens", "40")
    set_setting(page, "Temperature", "0")
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


def test_a_state_that_is_lacking_is_explained_with_numbers(page: Page) -> None:
    words = "async (answer) => (await import(new URL('web/chat_words.js', location))).cacheWords(answer).long"
    found = {"cached": 4096, "prompt": 6000, "reason": "state_evicted", "common": 5008}
    begins = "4,096 of 6,000 prompt tokens came from the cache. "
    next_state = "5,008 were in the cache, but the next state of the recurrent layers was evicted to make room."
    assert page.evaluate(words, found) == begins + next_state
    del found["common"]
    assert page.evaluate(words, found).startswith(begins + "More of it was cached")


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
        assert llm.prompt() == "<system>Be brief.<user>Hello<assistant>"
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


# promise: page-continue
def test_an_answer_has_a_limit_and_continue_goes_on_with_the_same_message(open_stand_in: OpenPage) -> None:
    with speaking("one", " two", context=2048) as (llm, url):
        llm.end = "length"
        page = open_stand_in(url).page
        expect(page.get_by_label("Max tokens")).to_have_attribute("placeholder", "512")
        send(page, "Count")
        answer = answers(page).first
        expect(answer).to_contain_text("2 tokens")
        expect(answer).to_contain_text("max tokens reached")
        page.reload()  # it can also go on later
        llm.pieces, llm.end = (", three",), "stop"
        answer.get_by_role("button", name="Continue").click()
        expect(answer.locator("> .text")).to_have_text("one two, three")
        expect(answer).to_contain_text("3 tokens")
        expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()
        expect(answer.get_by_role("button", name="Continue")).to_have_count(0)
        expect(page.get_by_role("article")).to_have_count(2)
        assert [ask.params.max_tokens for ask in llm.asked] == [512, 512]
        assert llm.prompt(1) == "<system>You are Speaker.<user>Count<assistant>one two"
        send(page, "Again")
        expect(answers(page).nth(1)).to_contain_text("1 token")
        assert llm.prompt(2).endswith("<user>Count<assistant>one two, three<user>Again<assistant>")


# promise: page-continue
@pytest.mark.soak
def test_a_thought_that_was_cut_off_goes_on_too(open_stand_in: OpenPage) -> None:
    with speaking("<think>hidden", config=ServerConfig(reasoning_parser="think", inspector=False), context=2048) as (llm, url):
        llm.end = "length"
        page = open_stand_in(url).page
        send(page, "Hello")
        answer = answers(page).first
        expect(answer).to_contain_text("max tokens reached")
        llm.pieces, llm.end = (" depths", "</think>", "shown"), "stop"
        answer.get_by_role("button", name="Continue").click()
        expect(answer.locator("> .text")).to_have_text("shown")
        expect(answer.locator(".thought")).to_have_text("hidden depths")
        assert llm.prompt(1).endswith("<user>Hello<assistant><think>\nhidden")


# promise: page-continue
def test_the_default_limit_is_never_more_than_the_context_has_left(open_stand_in: OpenPage) -> None:
    too_long = RequestError("it is too long", "max_tokens", "context_length_exceeded")
    with speaking("yes", context=600) as (llm, url):
        page = open_stand_in(url, expected=[f"{STATUS} 400"]).page
        llm.refused = {512: too_long}
        llm.end = "length"
        send(page, "Hello")
        expect(answers(page).first).to_contain_text("max tokens reached")
        assert [ask.params.max_tokens for ask in llm.asked] == [512, None]
    with speaking(*["x"] * 30, context=30) as (llm, url):
        llm.end = "length"
        page = open_stand_in(url).page
        expect(page.get_by_label("Max tokens")).to_have_attribute("placeholder", "rest of context")
        send(page, "Hello")
        expect(answers(page).first).to_contain_text("the context is full")
        expect(answers(page).first.get_by_role("button", name="Regenerate")).to_be_visible()
        expect(answers(page).first.get_by_role("button", name="Continue")).to_have_count(0)
        assert llm.asked[0].params.max_tokens is None


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
        llm.gate.set()
        answers(page).first.get_by_role("button", name="Continue").click()
        expect(answers(page).first.locator("> .text")).to_have_text("firstfirstsecond")


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
