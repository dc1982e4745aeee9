"""A newcomer's walk through the page, on a desk and on a phone.

At each stop it calls `look` with the stop's name: the test looks at the page there in many sizes, docs/pictures/make.py takes the pictures
of the documents. The walk itself checks what a stop is about, so a picture never shows a page that the test would refuse.
"""

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Page, expect

Look = Callable[[str], None]

QUESTION = "What does the heart do?"  # one of those that the page suggests
RULES = (
    "You are the guide of a small museum by the sea. Visitors ask you about the animals, plants, rocks and stars that they see "
    "here. Answer in two or three short paragraphs of plain words, as to a curious child of twelve. Begin with the answer itself. "
    "Then explain why it is so, with one example from everyday life. Explain a scientific word when you use it for the first time."
    " If you are not sure, say so, and name a room of the museum where the visitor can look. The ground floor has the whales, the "
    "tide pool and the room of shells. The first floor has the birds, the insects and the minerals. The tower has the telescope, "
    "which is open on clear evenings. Never answer questions about prices and opening hours: the desk at the entrance does that. "
    "End with one question that the visitor could ask next."
)
VISITORS = (
    "Why do leaves change colour?",
    "How do whales sleep?",
    "What makes thunder so loud?",
    "Why is the sea salty?",
    "How do bees find their way?",
    "What is a fossil?",
    "Why do cats purr?",
    "Do fish drink water?",
    "What are clouds made of?",
    "Why does the moon change?",
    "How do volcanoes work?",
    "Why do stars twinkle?",
)
COUNTS = """() => {
  const number = (text) => Number(text.replaceAll(",", ""));
  const kinds = [...document.querySelectorAll(".pool-counts b")].map((count) => [count.dataset.kind, number(count.textContent)]);
  const [used, all] = document.querySelector(".pool-figures").textContent.match(/[\\d,]+/g).map(number);
  return { ...Object.fromEntries(kinds), used, all, running: number(document.querySelector("[data-figure=running]").textContent) };
}"""
GRID = """() => {
  const { width } = document.querySelector(".grid-cells").getBoundingClientRect();
  return [width, Number(document.querySelector(".pool").dataset.cell)];
}"""


@contextmanager
def requests(url: str, path: str, bodies: Sequence[dict[str, Any]]) -> Iterator[None]:
    """They run at the same time, the others after the first has its first token: what it has in common with them is cached then.

    At the end they are cancelled: nobody reads on.
    """
    first, over = threading.Event(), threading.Event()

    def run(body: dict[str, Any]) -> None:
        data = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            for _ in answer:
                first.set()
                if over.is_set():
                    return

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    threads[0].start()
    first.wait()
    for thread in threads[1:]:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def museum(url: str, rules: str = RULES, most: int = 400) -> Any:
    """Twelve requests with the same system prompt."""
    messages = [[{"role": "system", "content": rules}, {"role": "user", "content": text}] for text in VISITORS]
    return requests(url, "/v1/chat/completions", [{"messages": each, "max_tokens": most} for each in messages])


def on_a_desk(page: Page, url: str, look: Look, rules: str = RULES) -> None:
    """Every stop of a visit at a desk; `rules` are the system prompt of the twelve requests."""
    page.goto(url)
    be_welcomed(page)
    look("welcome")
    ask(page)
    with museum(url, rules):
        see_the_twelve(page)
        point_at_what_they_share(page)
        look("shared blocks")
        page.locator(".request").nth(3).click()
        expect(page.get_by_role("complementary", name="Block table")).to_contain_text("shared by 12")
        look("block table")
        page.keyboard.press("Escape")
    expect(page.locator(".pool-figures")).to_have_text(re.compile("^0 of "))
    come_back(page)
    look("reloaded")
    branch(page)
    look("columns")
    page.get_by_role("button", name="Show all").click()
    expect(page.locator(".pool")).to_have_attribute("data-shows", "map")
    look("map")
    follow_the_lesson(page)
    look("lesson")
    page.get_by_role("button", name="Close the lesson").click()
    expect(page.locator(".pool-figures")).not_to_contain_text("of 32 blocks")
    expect(page.locator("#chat")).to_be_visible()


def on_a_phone(page: Page, url: str, look: Look, rules: str = RULES) -> None:
    """Every stop of a visit by phone, while the server answers the twelve."""
    with museum(url, rules):
        page.goto(url)
        be_welcomed(page)
        look("phone: welcome")
        ask(page)
        look("phone: answer")
        page.get_by_role("button", name="Show in the pool").click()
        drawer, marked = page.get_by_role("complementary", name="Block table"), page.locator(".places [aria-current]")
        expect(drawer).to_be_visible()
        expect(page.locator("#pool-title")).to_be_in_viewport()
        expect(marked).to_have_text(["Block pool"])
        look("phone: block table")
        for part in ("Timeline", "Chat", "Block pool"):
            page.get_by_role("link", name=part, exact=True).click()
            expect(marked).to_have_text([part])
            expect(drawer).to_be_hidden()
            look(f"phone: {part.lower()}")
    page.get_by_role("button", name="Conversations").click()
    expect(page.get_by_role("button", name="Rename").first).to_be_visible()
    page.get_by_role("link", name="Timeline").click()
    expect(page.get_by_role("navigation", name="Conversations")).to_be_hidden()
    page.locator(".parts").evaluate("node => { node.dispatchEvent(new WheelEvent('wheel')); node.scrollTop = 0; }")
    expect(marked).to_have_text(["Chat"])


def be_welcomed(page: Page) -> None:
    welcome = page.get_by_role("region", name="Welcome")
    expect(welcome).to_contain_text("Octavo runs a language model and shows its memory at work")
    expect(welcome.get_by_role("listitem")).to_have_count(3)
    expect(welcome.get_by_role("button", name="Show me how paging works")).to_be_in_viewport(ratio=1)


def ask(page: Page) -> None:
    """A suggested question, until its answer is complete."""
    page.get_by_role("button", name=QUESTION).click()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(page.get_by_role("article", name="Answer")).to_contain_text("first token after")


def see_the_twelve(page: Page) -> None:
    expect(page.locator(".request-group", has_text="Running 12").locator(".request")).to_have_count(12)
    expect(page.locator(".request", has_text="reading the prompt")).to_have_count(0)
    expect(page.locator("[data-figure=running]")).to_have_text("12")
    expect(page.locator(".pool-counts")).to_contain_text("shared")
    agree(page)


def agree(page: Page) -> None:
    """The numbers on the page: each block is counted once."""
    counts = page.evaluate(COUNTS)
    assert counts["held"] + counts["shared"] + counts["pinned"] == counts["used"], counts
    assert counts["used"] + counts["cached"] + counts["free"] == counts["all"], counts


def point_at_what_they_share(page: Page) -> None:
    """They are one after the other in the grid, behind the blocks of what was asked before."""
    wide, side = page.evaluate(GRID)
    columns, detail, pool = int(wide / side), page.locator(".pool-detail"), page.locator(".pool")
    for place in range(5, 40):
        page.locator(".grid-marks").hover(position={"x": (place % columns + 0.5) * side, "y": (place // columns + 0.5) * side})
        if said := re.match(r"Block \d+: shared by 12; entry [1-9]", detail.inner_text()):
            expect(pool).not_to_have_attribute("data-at", pool.get_attribute("data-at") or "")
            later = detail.inner_text()
            if page.evaluate(GRID) != [wide, side]:  # they are too many for squares of this size now
                return point_at_what_they_share(page)
            assert later.startswith(said[0]), f"{said[0]} became {later}, though nobody moved"
            return
    raise AssertionError(f"no block is shared by twelve: {page.locator('.pool-counts').inner_text()}")


def come_back(page: Page) -> None:
    """After a reload, and in a second tab: the conversation and the timeline are there."""
    step = page.locator(".timeline-step").inner_text()
    second = page.context.new_page()
    page.reload()
    second.goto(page.url)
    for tab in (second, page):
        expect(tab.locator(".conversations .opener", has_text=QUESTION)).to_be_visible()
        expect(tab.locator(".timeline-step")).to_have_text(step)
        expect(tab.locator(".timeline-before")).to_contain_text("Before this page was opened")
        agree(tab)
    expect(page.get_by_role("article", name="Answer")).to_contain_text("first token after")
    second.close()


def branch(page: Page) -> None:
    page.get_by_role("button", name="Branch").first.click()
    column = page.locator(".column").nth(1)
    column.get_by_role("textbox", name="Message", exact=True).fill("Say it in one sentence.")
    page.keyboard.press("Enter")
    expect(column.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(column.get_by_role("article", name="Answer").last).to_contain_text("first token after")


def follow_the_lesson(page: Page) -> None:
    """To its fourth scene, in which requests share a prefix."""
    page.get_by_role("button", name="Lesson", exact=True).click()
    lesson = page.get_by_role("region", name="Lesson")
    lesson.get_by_role("button", name=re.compile("^Scene 4")).click()
    expect(lesson.get_by_role("button", name="Play again")).to_be_visible()
