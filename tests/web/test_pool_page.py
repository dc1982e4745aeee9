"""The block pool and the timeline in a real browser, fed by a stream that the test scripts."""

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.soaked import rarely
from tests.support.view_frames import Frame, ViewModel
from tests.support.view_host import ViewHost, view_host
from tests.web.layout import assert_all_can_be_seen

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, expect
except ModuleNotFoundError:
    pytest.skip("the page is tested with playwright and axe-playwright-python (requirements/dev.txt)", allow_module_level=True)

PLACE = """async (block) => {
  const { cellOf, layOut, placeOf } = await import(new URL("web/pool_layout.js", location));
  const stage = document.querySelector(".pool-stage");
  const layout = layOut(stage.clientWidth, stage.clientHeight, view.state.head.num_blocks);
  return [...placeOf(layout, cellOf(layout, block)), layout.size];
}"""
PIXELS = """([canvas, x, y, side]) => {
  const pixel = new OffscreenCanvas(side, side).getContext("2d", { willReadFrequently: true });
  pixel.drawImage(document.querySelector(canvas), -Math.round(x * devicePixelRatio), -Math.round(y * devicePixelRatio));
  return [...pixel.getImageData(0, 0, side, side).data];
}"""
PALETTE = """async () => (await import(new URL("web/palette.js", location))).readPalette(document.querySelector(".pool"))"""
OWN_COLOUR = """() => getComputedStyle(document.querySelector(".pool-drawer")).borderTopColor.match(/\\d+/g).map(Number)"""


@pytest.fixture
def pool_host() -> Iterator[ViewHost]:
    with view_host() as host:
        yield host


OpenPage = Callable[..., Page]


@pytest.fixture
def open_pool(browser: Browser, pool_host: ViewHost) -> Iterator[OpenPage]:
    """Opens the harness; at the end nothing may have been complained of, and nobody else asked for anything."""
    complaints: list[str] = []
    contexts = []

    def listen(page: Page) -> None:
        def on_console(message: ConsoleMessage) -> None:
            refused = message.location["url"].endswith("/v1/view")  # as a test wanted it
            if message.type in ("error", "warning") and not refused:
                complaints.append(message.text)

        def on_request(request: Request) -> None:
            if not request.url.startswith((pool_host.url, "data:", "blob:")):
                complaints.append(request.url)

        page.on("console", on_console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", on_request)

    def open_it(query: str = "", **options: Any) -> Page:
        options = {"viewport": {"width": 1000, "height": 1100}, "reduced_motion": "reduce"} | options
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        listen(page)
        page.goto(f"{pool_host.url}/{query}")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []


class Story:
    """A small pool of two requests: one of 10 tokens in three blocks, then what a test does with it."""

    def __init__(self, host: ViewHost, num_blocks: int = 20, **options: Any) -> None:
        self.host = host
        self.model = ViewModel(1, num_blocks, **options)
        self.sent: list[Frame] = [self.model.head()]
        self.model.now = 1.0
        self.model.admit()
        self.model.write(self.model.seqs[0], 10)
        self.sent.append(self.tell_all(self.model.frame("full")))
        host.send(*self.sent)

    def tell_all(self, frame: Frame) -> Frame:
        """With the text of every block: the model leaves some out."""
        for row in frame.get("blocks", []):
            row[4] = self.model.blocks[row[0]].tokens or None
        return frame

    def go_on(self, *actions: Callable[[], Any]) -> None:
        self.model.step += 1
        self.model.now = round(self.model.now + 0.5, 3)
        before = {seq.seq: seq.tokens for seq in self.model.seqs.values()}
        for act in actions:
            act()
        wrote = sum(max(0, seq.tokens - before.get(seq.seq, 0)) for seq in self.model.seqs.values())
        used = sum(block.ref > 0 for block in self.model.blocks)
        self.model.new_steps.append([self.model.step, self.model.now, 20, wrote, 2, 3, len(self.model.seqs), 4, used, 1, 3, 6])
        self.sent.append(self.tell_all(self.model.frame("delta")))
        self.host.send(self.sent[-1])

    def write(self, seq: int, count: int) -> None:
        self.go_on(lambda: self.model.write(self.model.seqs[seq], count))


def kinds(page: Page) -> dict[str, int]:
    """Blocks by their kind, as far as they are counted on the page."""
    shown = page.locator(".pool-counts li:not([hidden]) b").all()
    return {str(count.get_attribute("data-kind")): int(count.inner_text()) for count in shown}


def entries(page: Page) -> list[str]:
    return page.locator(".entry-place").all_text_contents()


def request(page: Page, name: str) -> Locator:
    return page.locator(f".request[data-request='{name}']").first


def table_of(story: Story, seq: int) -> list[str]:
    return [f"{index} → {block}" for index, block in enumerate(story.model.seqs[seq].table)]


def position(page: Page, block: int) -> dict[str, float]:
    """Low on the left of a cell: inside the frame of one that is lit, and filled even where a block is a quarter full."""
    x, y, size = page.evaluate(PLACE, block)
    return {"x": x + 4, "y": y + size - 6}


def pixel(page: Page, block: int) -> list[int]:
    found: list[int] = page.evaluate(PIXELS, [".pool-cells", *position(page, block).values(), 1])
    return found


def crossed(page: Page, block: int) -> bool:
    """Whether a mark goes through the middle of a cell: an arrow or a cross does, a frame does not."""
    x, y, size = page.evaluate(PLACE, block)
    return any(page.evaluate(PIXELS, [".pool-marks", x + size / 2 - 3, y + size / 2 - 3, 5])[3::4])


def wait_until(page: Page, expression: str) -> None:
    """`wait_for_function` needs eval, which the page forbids."""
    deadline = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def wait_for_moment(page: Page, at: float) -> None:
    wait_until(page, f"Number(document.querySelector('.pool').dataset.at) === {at}")


# promise: live-block-pool
def test_the_pool_changes_as_it_runs(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    page = open_pool()
    expect(page.locator(".pool-figures")).to_contain_text("3 of 19 blocks in use")
    legend = page.locator(".pool-counts")
    expect(legend.locator("[data-kind=cached]")).to_have_text("0")
    free = story.model.free[-2]
    before = pixel(page, free)
    story.write(0, 7)  # into two blocks more
    expect(page.locator(".pool-figures")).to_contain_text("5 of 19 blocks in use")
    assert pixel(page, story.model.seqs[0].table[3]) != before
    expect(page.locator(".pool-caption")).to_be_empty()
    pool_host.send({"kind": "note", "at": story.model.now, "scene": 2, "of": 8, "title": "A boundary", "text": "It is crossed."})
    expect(page.locator(".pool-caption")).to_have_text("2 of 8: A boundaryIt is crossed.")
    story.go_on(lambda: story.model.end(story.model.seqs[0], "stop"))
    expect(page.locator(".pool-figures")).to_contain_text("0 of 19 blocks in use")
    expect(legend.locator("[data-kind=cached]")).to_have_text("4")
    expect(legend.locator("[data-kind=held]")).to_have_text("0")
    assert pool_host.keys == ["Bearer secret"]


# promise: pinned-prefix-seen
def test_a_pinned_block_is_marked_and_stays_in_use_without_a_request(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    page = open_pool()
    first, *others = story.model.seqs[0].table
    expect(page.locator(".pool-figures")).to_contain_text("3 of 19")
    shared = {"blocks": [[first, 2, 2, "ab" * 8, None, 1.5]], "events": [[3, 1.5, "pin", 1, 4]]}
    pool_host.send({"kind": "delta", "at": 1.5, **shared})
    expect(page.locator(".pool-news")).to_contain_text("a prefix of 4 tokens was pinned and stays in the cache, in 1 block")
    assert kinds(page) == {"held": 3, "free": 16}, "one request uses it: a pin shares nothing"
    page.locator(".pool-marks").hover(position=position(page, first))
    expect(page.locator(".pool-detail")).to_contain_text(f"Block {first}: in use; entry 0 of A (sequence 0); pinned; full")
    alone = [[first, 2, 3, "ab" * 8, None, 1.5], *([block, 0, 0, "", None, None] for block in others)]  # by two pins
    pool_host.send({"kind": "delta", "at": 2.0, "blocks": alone, "gone": [[0, "stop"]]})
    expect(page.locator(".pool-figures")).to_contain_text("1 of 19 blocks in use")
    assert kinds(page) == {"pinned": 1, "free": 18}, "they are the pool"
    expect(page.locator("[data-figure=used]")).to_have_text("5.3 %")
    expect(page.locator(".pool-detail")).to_contain_text(f"Block {first}: pinned, so it stays in the cache; full, digest abab")


def test_a_key_that_may_not_read_text_sees_blocks_and_is_told_so(open_pool: OpenPage, pool_host: ViewHost) -> None:
    model = ViewModel(1, 20)
    model.admit()
    model.write(model.seqs[0], 10)
    full = model.frame("full")
    for row in full["blocks"]:
        row[4] = [""] * len(model.blocks[row[0]].tokens)
    pool_host.send({**model.head(), "text": False}, full)
    page = open_pool()
    expect(page.locator(".pool-figures")).to_contain_text("3 of 19 blocks in use")
    page.locator(".pool-marks").click(position=position(page, model.seqs[0].table[0]))
    said = "The text is hidden. It is shown with the server's admin key, or by a server without a key on your own machine."
    for place in (".pool-detail .pool-text", ".entry-text >> nth=0"):
        expect(page.locator(place)).to_have_text(said)
    expect(page.locator(".pool-detail")).to_contain_text("4 of 4 tokens")


# promise: live-block-pool, every-sequence-seen
def test_a_request_lights_up_from_logical_to_physical(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    story.go_on(story.model.admit, lambda: story.model.write(story.model.seqs[1], 6))
    page = open_pool()
    wait_for_moment(page, story.model.now)
    mine, other = story.model.seqs[0].table[0], story.model.seqs[1].table[0]
    before = pixel(page, mine), pixel(page, other)
    page.locator(".pool-marks").hover(position=position(page, mine))
    expect(page.locator(".pool-detail")).to_contain_text(f"Block {mine}: in use; entry 0 of A (sequence 0); full, digest")
    expect(page.locator(".pool-detail .token")).to_have_count(4)
    page.locator(".pool-marks").click(position=position(page, mine))  # or by the list beside it
    expect(request(page, "cmpl-0")).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".entry")).to_have_count(3)
    drawer = page.get_by_role("complementary", name="Block table")
    expect(drawer).to_contain_text(f"Block {mine}: in use")
    assert page.evaluate(OWN_COLOUR) == page.evaluate(PALETTE)["seq"][0]
    page.mouse.move(0, 0)
    assert entries(page) == table_of(story, 0)
    words = "".join(story.model.blocks[mine].tokens).replace("\n", "⏎")
    assert page.locator(".entry-text").first.inner_text().replace("∅", "") == words
    assert pixel(page, mine) == before[0] and pixel(page, other) != before[1]  # mine as it was, the other dimmed
    page.evaluate("view.selection.set({ request: 'cmpl-1' })")  # as the chat does
    wait_until(page, "document.querySelector('.pool').dataset.lit === 'cmpl-1'")
    assert entries(page) == table_of(story, 1)
    assert pixel(page, mine) != before[0] and pixel(page, other) == before[1]
    table = table_of(story, 1)
    story.go_on(lambda: story.model.end(story.model.seqs[1], "stop"))
    wait_for_moment(page, story.model.now)
    assert entries(page) == table  # it has ended: what it left in the cache is still lit, what was not sealed is not
    expect(page.locator(".entry-text").last).to_have_text("was not full, so it was freed at the end")
    short: list[list[str]] = []

    def come_and_go() -> None:
        story.model.admit()
        story.model.write(story.model.seqs[2], 9 - story.model.seqs[2].tokens)
        short.append(table_of(story, 2))
        story.model.end(story.model.seqs[2], "length")

    story.go_on(come_and_go)  # within one frame
    drawer.get_by_role("button", name="Close the block table").click()
    expect(drawer).to_be_hidden()
    page.locator(".request-group summary").click()
    expect(request(page, "cmpl-2")).to_contain_text("reached its token limit")
    request(page, "cmpl-2").click()
    wait_until(page, "document.querySelector('.pool').dataset.lit === '2'")
    assert [entries(page)] == short and len(short[0]) == 3
    assert page.locator(".entry .token").count() == 8
    for _ in range(33):  # it leaves the list of those that ended last
        story.go_on(lambda: story.model.end(story.model.admit(), "stop"))
    expect(drawer).to_be_hidden()
    assert page.evaluate("view.selection.get()") == {}
    request(page, "cmpl-0").click()
    expect(drawer).to_be_visible()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Escape")  # from anywhere
    expect(drawer).to_be_hidden()
    expect(request(page, "cmpl-0")).to_be_visible()


def test_copies_evictions_preemptions_and_hits_are_seen(open_pool: OpenPage, pool_host: ViewHost) -> None:
    """In words, and as marks that go again."""
    story = Story(pool_host, num_blocks=6)
    page = open_pool()
    model = story.model
    wait_for_moment(page, 1.0)
    marks = "document.querySelector('.pool-marks').toDataURL()"
    blank = page.evaluate(marks)
    news = page.locator(".pool-news")
    story.go_on(lambda: model.fork(model.seqs[0]))
    expect(news).to_contain_text("A (sequence 0) was split: B (sequence 1) is another sample")
    source = model.seqs[0].table[2]
    story.write(1, 1)
    expect(news).to_contain_text(f"block {source} was copied to {model.seqs[1].table[2]}, because B (sequence 1) writes into it")
    assert crossed(page, source) and not crossed(page, model.seqs[0].table[0])
    story.go_on(lambda: model.end(model.seqs[0], "stop"))
    wait_until(page, f"{marks} === {json.dumps(blank)}")
    story.go_on(lambda: model.preempt(model.seqs[1]))
    expect(news).to_contain_text("B (sequence 1) was preempted")
    assert page.evaluate(marks) != blank
    expect(page.locator(".request-group", has_text="Waiting 1").locator(".request")).to_contain_text("preempted 1×")
    story.go_on(model.admit, lambda: model.write(model.seqs[2], 20 - model.seqs[2].tokens))
    expect(news).to_contain_text("evicted")
    assert crossed(page, next(event[3] for event in story.sent[-1]["events"] if event[2] == "evict"))
    wait_until(page, f"{marks} === {json.dumps(blank)}")
    model.event("hit", 2, 8, "differs")
    story.go_on()
    expect(news).to_contain_text("found 8 tokens of its prompt in the cache")
    assert page.evaluate(marks) != blank


# promise: live-block-pool
def test_pause_scrub_and_step_show_the_pool_of_that_moment(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    page = open_pool()
    tables = [table_of(story, 0)]
    for _ in range(6):
        story.write(0, 4)
        tables.append(table_of(story, 0))
    wait_for_moment(page, 4.0)
    request(page, "cmpl-0").click()
    page.get_by_role("button", name="Pause").click()
    story.write(0, 4)
    wait_until(page, "view.history.last === 4.5")
    assert page.evaluate("[view.time, view.state.at]") == [4.0, 4.0]
    assert entries(page) == tables[6]
    for back in (5, 4):
        page.get_by_role("button", name="One step back").click()
        wait_for_moment(page, 1 + back / 2)
        assert entries(page) == tables[back]
    slider = page.get_by_role("slider", name="Moment")
    slider.fill("1.2")
    wait_for_moment(page, 1.0)
    assert entries(page) == tables[0]
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    wait_for_moment(page, 2.0)
    assert entries(page) == tables[2]
    assert page.locator(".timeline-step").inner_text() == "Step 2 at 2.00 s: 4 prefill and 2 decode tokens of 3 sequences, 20.0 ms"
    expect(page.locator("[data-figure=running]")).to_have_text("1")  # as they are, not as the last step had them
    expect(page.locator("[data-figure=waiting]")).to_have_text("0")
    expect(page.locator("[data-figure=hits]")).to_have_text("50 %")
    expect(page.locator("[data-figure=preempted]")).to_have_text("2")
    expect(page.locator("[data-figure=decode]")).to_have_text("4")  # of two steps in the one second that is remembered
    expect(page.locator("[data-figure=prefill]")).to_have_text("8")
    page.get_by_role("button", name="Live").click()
    wait_for_moment(page, 4.5)
    assert entries(page) == table_of(story, 0)


def recording(story: Story) -> bytes:
    return "".join(json.dumps(frame) + "\n" for frame in story.sent).encode()


DROP = """text => {
  const data = new DataTransfer();
  data.items.add(new File([text], "run.ndjson"));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


# promise: what-came-before
@pytest.mark.parametrize(
    ("way", "later"), [*rarely(("picked", 30.0), ("dropped", 30.0)), ("address", -5.0)]  # by a clock that was set back
)  # fmt: skip
def test_a_recording_is_played_and_scrubbed_without_a_server(open_pool: OpenPage, pool_host: ViewHost, way: str, later: float) -> None:
    story = Story(pool_host)
    tables = [table_of(story, 0)]
    for _ in range(40):
        story.write(0, 1)
        tables.append(table_of(story, 0))
    again = Story(pool_host, num_blocks=50)  # the engine was started again, with another pool
    again.sent[0] |= {"epoch": 2, "started": again.sent[0]["started"] + later}
    again.write(0, 4)
    pool_host.status = 404
    pool_host.files["run.ndjson"] = recording(story) + recording(again) + b'{"kind":"delta","at":99,"blo'  # its server died while it wrote
    page = open_pool("?replay=run.ndjson" if way == "address" else "")
    if way != "address":
        expect(page.locator(".timeline-status")).to_contain_text("--no-inspector")
    if way == "picked":
        page.locator("input[type=file]").set_input_files([{"name": "run.ndjson", "mimeType": "", "buffer": pool_host.files["run.ndjson"]}])
    if way == "dropped":
        page.evaluate(DROP, pool_host.files["run.ndjson"].decode())
    expect(page.locator(".timeline-status")).to_have_text("Recording run.ndjson")
    page.get_by_label("Speed").select_option("8")
    wait_until(page, "view.moment > 6")  # at eight times its pace
    page.get_by_role("button", name="Pause").click()
    request(page, "cmpl-0").click()
    slider, last = page.get_by_role("slider", name="Moment"), max(later, 20.0) + 1.5
    for moment in (20.5, 1.0, last, 11.0):  # at once, also where it has not been played
        slider.fill(str(moment))
        wait_for_moment(page, moment)
        assert entries(page) == (table_of(again, 0) if moment == last else tables[int(2 * (moment - 1))])
        expect(page.locator(".pool-figures")).to_contain_text("of 49 blocks" if moment == last else "of 19 blocks")
        expect(page.get_by_text("the engine was started again")).to_have_count(int(moment == last))
        if moment == later + 1.5:  # a line in the timeline, where there is no step: of 30 s, a second and a half from the right
            wide = page.evaluate("document.querySelector('.timeline-bars').clientWidth")
            assert any(page.evaluate(PIXELS, [".timeline-bars", 0.95 * wide - 2, 30, 4])[3::4])
    slider.fill(str(last - 0.2))
    slider.press("ArrowLeft")
    wait_for_moment(page, last - 0.5)
    slider.fill("1")
    page.get_by_role("button", name="Play").click()
    slider.press("End")  # while it plays: it goes there and stays there
    wait_until(page, "!view.running")
    wait_for_moment(page, last)


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"hello\n", "a line is not JSON"), (b'{"kind":"head","version":9}\n', "version 9; this page reads"), (b"", "no full frame")],
)
def test_what_is_no_recording_is_refused(open_pool: OpenPage, pool_host: ViewHost, body: bytes, said: str) -> None:
    pool_host.files["run.ndjson"] = body
    page = open_pool("?replay=run.ndjson")
    expect(page.locator(".timeline-status")).to_contain_text("run.ndjson cannot be played: ")
    expect(page.locator(".timeline-status")).to_contain_text(said)


def test_a_recording_of_an_idle_engine_invites_nobody_to_ask(open_pool: OpenPage, pool_host: ViewHost) -> None:
    model = ViewModel(1, 20)
    pool_host.files["run.ndjson"] = "".join(json.dumps(frame) + "\n" for frame in (model.head(), model.frame("full"))).encode()
    page = open_pool("?replay=run.ndjson")
    expect(page.locator(".pool-figures")).to_contain_text("0 of 19 blocks in use")
    expect(page.locator(".pool-welcome")).to_be_hidden()


def test_a_recording_of_another_host_is_refused(open_pool: OpenPage, pool_host: ViewHost) -> None:
    page = open_pool("?replay=http://example.com/run.ndjson")
    expect(page.locator(".timeline-status")).to_contain_text("lies on another host")


@pytest.mark.soak
def test_a_stream_that_ends_is_opened_again_and_says_why_it_cannot(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    page = open_pool()
    expect(page.locator(".pool-figures")).to_contain_text("3 of 19")
    page.get_by_role("button", name="Pause").click()
    pool_host.status = 401
    pool_host.start_again()
    expect(page.locator(".timeline-status")).to_contain_text("only with a key")
    pool_host.status = 200
    Story(pool_host, num_blocks=50, before=story.model)
    page.evaluate("view.source.retry()")
    wait_until(page, "view.history.state.head.num_blocks === 50")
    expect(page.locator(".timeline-status")).to_have_text("")
    expect(page.locator(".pool-figures")).to_contain_text("3 of 19")  # whoever looks at what was is not disturbed
    page.get_by_role("button", name="Live").click()
    expect(page.locator(".pool-figures")).to_contain_text("3 of 49")


# promise: gone-server-seen
def test_a_page_whose_server_is_gone_does_not_call_what_it_shows_the_present(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    story.write(0, 4)
    page = open_pool()
    moment, used, running = page.locator(".timeline-moment"), page.locator("[data-figure=used]"), page.locator("[data-figure=running]")
    expect(page.locator(".request-group", has_text="Running 1")).to_be_visible()
    expect(moment).to_have_text("live")
    expect(running).to_have_text("1")
    before = page.evaluate("document.querySelector('.pool-cells').clientHeight")
    pool_host.status = 503
    pool_host.start_again()
    expect(moment).to_have_text("not connected")
    expect(page.locator(".pool-status")).to_contain_text("trying again. This is how the pool was last seen.")
    expect(page.locator(".request-group", has_text="Were running 1")).to_be_visible()
    for figure in (running, used, page.locator("[data-figure=decode]")):
        expect(figure).to_have_text("–")
    expect(page.locator("[data-figure=hits]")).to_have_text("50 %")  # of the time shown
    expect(page.locator(".timeline-step")).to_have_text(re.compile("^Step 1 at 1.50 s: "))
    assert page.evaluate("document.querySelector('.pool-cells').clientHeight") == before
    page.get_by_role("button", name="One step back").click()
    expect(moment).to_have_text("0.50 s ago")  # what was is known as before
    expect(page.locator(".pool-status")).to_be_hidden()
    page.get_by_role("button", name="Live").click()
    pool_host.status = 200
    pool_host.send(story.model.head(), {**story.model.frame("full"), "at": 2.0})
    page.evaluate("view.source.retry()")
    expect(moment).to_have_text("live")
    expect(page.locator(".request-group", has_text="Running 1")).to_be_visible()
    expect(used).not_to_have_text("–")


# promise: timeline-of-before
@pytest.mark.soak
def test_the_steps_of_before_are_shown_and_said_to_be_without_blocks(open_pool: OpenPage, pool_host: ViewHost) -> None:
    """After a reload, or in a second tab: the figures are of the time shown, and the pool goes back to when the page was opened."""
    model = ViewModel(1, 20)
    model.admit()
    model.write(model.seqs[0], 10)
    steps = [[step, 100.0 + step / 2, 20, 0, 3, 1, 1, 0, 3, 0, 8 * (step == 10), 10 * (step == 10)] for step in (2, 4, *range(5, 41))]
    pool_host.send(model.head(), {**model.frame("full"), "at": 120.5, "steps": steps})
    page = open_pool()
    note, step, bars = page.locator(".timeline-before"), page.locator(".timeline-step"), page.locator(".timeline-bars")
    expect(note).to_have_text("Before this page was opened: steps only, no blocks")
    expect(page.locator("[data-figure=hits]")).to_have_text("80 %")
    expect(page.locator(".figure", has=page.locator("[data-figure=hits]")).locator("dt")).to_have_text("Prefix hits, 30 s")
    width = page.evaluate("document.querySelector('.timeline-bars').clientWidth")

    def place(at: float) -> dict[str, float]:
        return {"x": width * (1 - (page.evaluate("view.now") - at) / 30), "y": 40}

    page.evaluate("view.pause()")
    expect(page.locator("[data-figure=decode]")).to_have_text("6")  # of five seconds, as if the page had been open
    bars.hover(position=place(101.9))
    expect(step).to_have_text(re.compile(r"^Steps 3 to 4 at 102\.00 s: .*\. Its blocks are not known$"))
    bars.click(position=place(110.0))
    wait_for_moment(page, 120.5)
    page.get_by_label("Shown").select_option("2")
    expect(page.locator("[data-figure=hits]")).to_have_text("–")  # nothing was asked in these two seconds
    page.get_by_role("button", name="Live").click()
    expect(note).to_be_hidden()  # soon they are no longer in the time shown


def test_everything_is_done_by_keyboard(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    page = open_pool()
    wait_for_moment(page, 1.0)
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"))
    assert {"Blocks of the pool", "One step back", "Pause", "Moment", "Open a recording"} <= set(reached)
    page.locator(".pool-marks").focus()
    last = story.model.seqs[0].table[2]
    page.keyboard.press("Home")
    for _ in range(last - 1):
        page.keyboard.press("ArrowRight")
    said = f"Block {last}: in use; entry 2 of A (sequence 0); for 0.0 s; 2 of 4 tokens."
    expect(page.locator(".pool-said[role=status]")).to_have_text(said)
    page.keyboard.press("Enter")
    expect(page.locator(".entry")).to_have_count(3)
    page.keyboard.press("Escape")
    expect(page.locator(".entry")).to_have_count(0)


@pytest.mark.soak
def test_it_is_sharp_fits_a_phone_and_follows_the_theme(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    page = open_pool(viewport={"width": 390, "height": 800}, device_scale_factor=2)
    wait_for_moment(page, 1.0)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for canvas in (".pool-cells", ".timeline-bars"):
        wide, shown = page.evaluate(f"(c => [c.width, c.clientWidth])(document.querySelector('{canvas}'))")
        assert wide == 2 * shown > 300
    free = story.model.free[0]
    before = pixel(page, free)
    page.evaluate("document.documentElement.style.setProperty('--free', 'rgb(1 2 3)'); document.dispatchEvent(new Event('themechange'))")
    page.wait_for_timeout(200)
    assert before != pixel(page, free) == [1, 2, 3, 255]


NUM_BLOCKS = 5824  # what the default model gets in 2 GB


def block_at(page: Page, place: int) -> str:
    """The block at a place of the grid, as who points at it reads it."""
    size = int(page.locator(".pool").get_attribute("data-cell") or 0)
    columns = page.evaluate("document.querySelector('.grid-stage').clientWidth") // size
    page.locator(".grid-marks").hover(position={"x": (place % columns + 0.5) * size, "y": (place // columns + 0.5) * size})
    return page.locator(".pool-detail p").first.inner_text().partition(":")[0]


def colour_in_grid(page: Page, place: int) -> list[int]:
    """Low on the left of a place, which is filled even where its block is a quarter full."""
    size = int(page.locator(".pool").get_attribute("data-cell") or 0)
    columns = page.evaluate("document.querySelector('.grid-stage').clientWidth") // size
    found: list[int] = page.evaluate(PIXELS, [".grid-cells", place % columns * size + 4, (place // columns + 1) * size - 6, 1])
    return found


def colour_in_map(page: Page, block: int) -> list[int]:
    """On the left of the block's cell, which it may share with others, below the middle: there half a block is seen."""
    x, y, size = page.evaluate(PLACE, block)
    found: list[int] = page.evaluate(PIXELS, [".pool-cells", x + 0.15 * size, y + 0.6 * size, 1])
    return found


def assert_map_is_drawn(page: Page, used: int, free: int) -> None:
    """In the size in which it is seen, and with the colours of its blocks."""
    drawn, seen = page.evaluate("(c => [[c.width, c.height], [c.clientWidth, c.clientHeight]])(document.querySelector('.pool-cells'))")
    assert drawn == seen
    assert colour_in_map(page, free) == [*page.evaluate(PALETTE)["free"], 255] != colour_in_map(page, used)


def test_a_small_pool_is_one_picture_of_every_block(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    page = open_pool()
    wait_for_moment(page, 1.0)
    expect(page.locator(".pool")).to_have_attribute("data-shows", "all")
    assert_map_is_drawn(page, story.model.seqs[0].table[0], story.model.free[0])
    assert [page.locator(part).is_visible() for part in (".pool-stage", ".grid-stage", ".pool-whole")] == [True, False, False]


# promise: used-blocks-readable
def test_before_anything_was_asked_it_says_what_a_square_is_and_then_used_blocks_are_large_and_stay(
    open_pool: OpenPage, pool_host: ViewHost
) -> None:
    untouched = ViewModel(1, NUM_BLOCKS)
    pool_host.send(untouched.head(), untouched.frame("full"))
    page = open_pool()
    pool, welcome = page.locator(".pool"), page.locator(".pool-welcome")
    block = "Each square here is a block: a piece of memory with room for 4 tokens of a conversation. A letter marks who uses it."
    expect(welcome.locator("p")).to_have_text(block)
    expect(welcome.locator(".welcome-squares span")).to_have_text(["A", "A", "", "", ""])
    story = Story(pool_host, num_blocks=NUM_BLOCKS)
    model = story.model
    wait_for_moment(page, 1.0)
    expect(welcome).to_be_hidden()
    expect(pool).to_have_attribute("data-shows", "grid")
    expect(pool).to_have_attribute("data-cell", "72")
    first = sorted(model.seqs[0].table)
    assert colour_in_grid(page, 0) == [*page.evaluate(PALETTE)["seq"][0], 255]
    expect(page.locator(".pool-whole")).to_have_text("All 5,823 blocks")
    assert_map_is_drawn(page, first[0], NUM_BLOCKS // 2)  # as a strip
    assert [block_at(page, place) for place in range(3)] == [f"Block {block}" for block in first]
    story.go_on(model.admit, lambda: model.write(model.seqs[1], 8))  # blocks with lower numbers come behind those that are there
    story.write(0, 8)
    wait_for_moment(page, model.now)
    later = [*model.seqs[1].table, *model.seqs[0].table[3:]]
    assert [block_at(page, place) for place in range(3)] == [f"Block {block}" for block in first]
    assert sorted(block_at(page, place) for place in range(3, 3 + len(later))) == sorted(f"Block {block}" for block in later)
    kept = block_at(page, 3 + len(later) - 1)
    story.go_on(lambda: model.end(model.seqs[1], "abort"), model.admit, lambda: model.write(model.seqs[2], 4))  # others come and go
    wait_for_moment(page, model.now)
    assert block_at(page, 3 + len(later) - 1) == kept
    page.get_by_role("button", name="Show all").click()
    expect(pool).to_have_attribute("data-shows", "map")
    assert_map_is_drawn(page, first[0], NUM_BLOCKS // 2)
    x, y, size = page.evaluate(PLACE, first[0])
    page.locator(".pool-marks").hover(position={"x": x + size / 2, "y": y + size / 2})
    expect(page.locator(".pool-detail")).to_contain_text(f"Block {first[0]}: in use")
    page.get_by_role("button", name="Show the blocks in use").click()
    expect(pool).to_have_attribute("data-shows", "grid")
    assert [block_at(page, place) for place in range(3)] == [f"Block {block}" for block in first]


# promise: used-blocks-readable
@pytest.mark.soak
def test_the_more_blocks_are_used_the_smaller_they_are_until_they_share_cells(open_pool: OpenPage, pool_host: ViewHost) -> None:
    model = ViewModel(1, NUM_BLOCKS)
    at = 1.0

    def hold(count: int, cached: int = 0) -> tuple[str, int]:
        """So many blocks in use, and so many cached: what is shown then, and how large a cell is."""
        nonlocal at
        at += 1
        blocks = [[block, int(block <= count), int(block <= count + cached), f"{block:016x}", None, 1.0] for block in range(1, NUM_BLOCKS)]
        pool_host.send({"kind": "delta", "at": at, "blocks": blocks})
        wait_for_moment(page, at)
        return str(page.locator(".pool").get_attribute("data-shows")), int(page.locator(".pool").get_attribute("data-cell") or 0)

    pool_host.send(model.head(), {**model.frame("full"), "at": 1.0})
    page = open_pool(viewport={"width": 800, "height": 1100})
    wait_for_moment(page, 1.0)
    expect(page.locator(".pool-welcome")).to_be_visible()
    hold(0, 5)  # somebody has asked before this page was opened
    expect(page.locator(".pool-welcome")).to_be_hidden()
    assert hold(20) == ("grid", 72)
    assert hold(400)[0] == "grid" and 20 <= hold(400)[1] < 44
    assert hold(20, 300)[1] >= 20
    expect(page.locator(".pool-counts")).not_to_contain_text("have no room")  # all cached blocks are seen where they can be read
    assert hold(20, 5000) == ("grid", 20)  # cached blocks have what room is left, and those in use can be read
    expect(page.locator(".pool-counts")).to_contain_text(re.compile(r"cached 5,000 \(4,\d\d\d have no room here\)"))
    assert block_at(page, 0) == "Block 1"
    assert hold(1000)[0] == "grid" and 7 <= hold(1000)[1] < 20
    assert hold(5800)[0] == "map"
    assert page.get_by_role("button", name="Show the blocks in use").is_hidden()
    expect(page.locator(".pool-whole")).to_contain_text("too many are in use")
    assert hold(20) == ("grid", 72)


# promise: requests-page-what
@pytest.mark.soak
def test_figures_are_of_now_even_while_nothing_comes(open_pool: OpenPage, pool_host: ViewHost) -> None:
    """A step under way has an age, whoever waits for it is listed, and an idle engine makes no tokens."""
    story = Story(pool_host)
    model = story.model
    page = open_pool()
    story.write(0, 4)
    figures = {name: page.locator(f"[data-figure={name}]") for name in ("decode", "prefill", "running", "waiting")}
    expect(figures["decode"]).to_have_text("2")
    expect(figures["prefill"]).to_have_text("4")
    model.admit().state = "waiting"
    pool_host.send(model.frame("delta"))
    expect(page.locator(".request-group", has_text="Waiting 1")).to_be_visible()
    expect(figures["waiting"]).to_have_text("1")
    expect(page.locator(".timeline-step")).to_have_text(re.compile(r"^Step 2 is running, for \d+\.\d s now\.$"))
    for seq in list(model.seqs.values()):
        model.end(seq, "stop")
    pool_host.send({**model.frame("delta"), "at": model.now + 4.5})
    expect(page.get_by_text("No request is running or waiting.")).to_be_visible()
    expect(figures["running"]).to_have_text("0")
    expect(figures["decode"]).to_have_text("0")  # without another frame
    expect(figures["prefill"]).to_have_text("0")
    expect(page.locator(".timeline-step")).to_contain_text("Step 1 at 1.50 s")


# promise: requests-page-what
def test_requests_are_called_by_what_was_asked(open_pool: OpenPage, pool_host: ViewHost) -> None:
    asked = ["<|im_start|>", "system\nBe kind.", "<|im_end|>", "\n", "<|im_start|>", "user\nWhy is the", " sky <b>blue</b>?"]
    asked += ["<|im_end|>", "\n"]
    prompts = [[*asked, "<|im_start|>", "assistant\n"], ["Once", " upon", " a", " time"], []]
    rows, blocks = [], []
    for seq, pieces in enumerate(prompts):
        table = list(range(1 + 4 * seq, 1 + 4 * seq + -(-len(pieces) // 4)))
        blocks += [[block, 1, 0, "", pieces[4 * index : 4 * index + 4], 1.0] for index, block in enumerate(table)]
        rows.append({"seq": seq, "request": f"cmpl-{seq}", "sample": seq, "samples": 3, "state": "running" if pieces else "waiting",
                     "prompt": len(pieces) or 900, "tokens": len(pieces) + 5, "limit": len(pieces) + 20, "computed": len(pieces) + 4,
                     "cached": 4, "reason": "differs", "preemptions": 0, "from": 0, "table": table})  # fmt: skip
    rows.append({**rows[2], "seq": 3, "request": "cmpl-3", "asked": ["kind.", *asked[2:], "<|im_start|>", "assistant\n"]})
    pool_host.send(ViewModel(1, 20).head(), {"kind": "full", "at": 1.0, "blocks": blocks, "seqs": rows})
    page = open_pool()
    question = "Why is the sky <b>blue</b>?"
    expect(page.locator(".request-name")).to_have_text([question, "Once upon a time", "cmpl-2", question])
    expect(request(page, "cmpl-1")).to_contain_text("sample 2 of 3 · 5 of at most 20 tokens · 4 from the cache")
    expect(request(page, "cmpl-2")).to_contain_text("waiting, 900 prompt tokens")
    request(page, "cmpl-0").click()
    expect(page.locator(".drawer-title")).to_have_text(question)
    said = "4 of 11 prompt tokens came from the cache. From there on, this prompt is different"
    expect(page.locator(".drawer-facts")).to_contain_text(said)


@pytest.mark.soak
def test_the_longest_numbers_and_names_have_room_at_every_size(open_pool: OpenPage, pool_host: ViewHost) -> None:
    model = ViewModel(1, NUM_BLOCKS)
    pool_host.send(model.head(), model.frame("full"))
    page = open_pool("page")
    for _ in range(9):
        model.write(model.admit(), 60)
    for seq in list(model.seqs.values())[:4]:
        model.end(seq, "length")
    for row in (frame := model.frame("delta"))["seqs"]:
        row |= {"request": f"chatcmpl-{row['seq']:032x}", "samples": 4, "limit": 1_000_000, "reason": "differs", "cached": 4}
    pool_host.send({**frame, "at": 2.0, "steps": [[1, 2.0, 1234.5, 12_000, 250, 250, 250, 12, 3000, 4, 5, 6]]})
    expect(page.locator(".request-group", has_text="Running 5")).to_be_visible()
    page.locator(".request-group summary").click()
    assert_all_can_be_seen(page, "requests")
    page.locator(".request").first.click()
    expect(page.locator(".entry").first).to_be_visible()
    assert_all_can_be_seen(page, "drawer")


def test_state_slots_are_a_line_and_a_sequence_says_where_states_are_kept(open_pool: OpenPage, pool_host: ViewHost) -> None:
    story = Story(pool_host)
    page = open_pool()
    strip = page.get_by_role("list", name="State slots of each kind")
    expect(page.locator(".pool-states")).to_be_hidden()
    seq = story.model.frame("full")["seqs"][0]["seq"]
    pool_host.send({"kind": "delta", "at": 3.0, "states": [1200, 3, 12, 2], "seqs": [{"seq": seq, "checkpoints": [256, 1024]}]})
    expect(strip).to_have_text(re.compile("State slots 1,200.*live 3.*checkpoints 12.*pinned 2.*empty 1,183", re.DOTALL))
    page.locator(".pool-requests button").first.click()
    expect(page.locator(".drawer-facts")).to_contain_text("States of the recurrent layers are kept after 256, 1,024 tokens.")
    assert_all_can_be_seen(page, "states")


# promise: ranks-watched
@pytest.mark.soak
def test_ranks_are_a_line_each_and_one_that_is_silent_is_marked(open_pool: OpenPage, pool_host: ViewHost) -> None:
    model = ViewModel(1, NUM_BLOCKS)
    same = {"stages": 2, "device": "cpu", "kernels": "native avx512", "weight_bytes": 2**30}
    cores = [f"{8 * rank}-{8 * rank + 7},{64 + rank}" for rank in range(8)]
    ranks = [{"rank": rank, "stage": rank // 4, "layers": [14 * (rank // 4), 14], "cores": cores[rank], **same} for rank in range(8)]
    ranks[2]["host"] = "second"
    pool_host.send(model.head(), model.frame("full"))
    page = open_pool("page")
    expect(page.locator(".pool-welcome")).to_be_visible()
    expect(page.locator(".pool-ranks")).to_be_hidden()
    again = {**model.head(), "ranks": ranks}
    pool_host.start_again(again, {**model.frame("full"), "ranks": [[rank, 10, 0.25, 0.1] for rank in range(8)]})
    lines = page.get_by_role("list", name="Ranks").get_by_role("listitem")
    expect(lines).to_have_count(8)
    expect(lines.nth(5)).to_have_text("Rank 5 stage 1, layers 14–27, cores 40-47,69, 25 % in steps")
    pool_host.send({"kind": "delta", "at": 3.0, "ranks": [[rank, 20, 0.996, 12.4 if rank == 3 else 0.2] for rank in range(8)]})
    expect(lines.nth(3)).to_have_text("Rank 3 stage 0, layers 0–13, cores 24-31,67, 100 % in steps, silent for 12 s")
    expect(lines.nth(2)).to_have_text("Rank 2 stage 0, layers 0–13, cores 16-23,66 on second, 100 % in steps")
    assert_all_can_be_seen(page, "ranks")
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []
