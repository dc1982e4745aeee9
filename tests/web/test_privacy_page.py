"""What a second browser sees of the first one's prompt: its text on the server's own machine, and nothing but blocks from elsewhere."""

import json
import socket
from collections.abc import Iterator

import pytest

from octavo.inspector.state import ViewState
from tests.support.server_process import ServerProcess
from tests.support.story_folder import story_folder
from tests.web.conftest import OpenPage

try:
    from playwright.sync_api import Page, expect
except ModuleNotFoundError:
    pytest.skip("tests of the page want playwright: pip install -r requirements/dev.txt", allow_module_level=True)

ADMIN = "sk-admin"
NO_TLS = "Cross-Origin-Opener-Policy header has been ignored"  # what the browser says of a page without TLS
PROMPT = "The secret garden of Lily was behind the old wall"
ASK = """async (prompt) => {
  const body = JSON.stringify({ prompt, max_tokens: 8, ignore_eos: true });
  const answer = await fetch("/v1/completions", { method: "POST", headers: { "content-type": "application/json" }, body });
  return (await answer.json()).id;
}"""
LINES = """async (headers) => {
  const reader = (await fetch("/v1/view", { headers })).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (!text.includes('"digests"') || !text.endsWith("\\n")) text += (await reader.read()).value; // a request has ended
  await reader.cancel();
  return text;
}"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address that other machines have for a server without a key."""
    folder = story_folder(tmp_path_factory.mktemp("shared") / "stories", end_ids=[])
    flags = ("--host", "0.0.0.0", "--admin-key", ADMIN, "--block-size", "4", "--num-gpu-blocks-override", "300")
    with ServerProcess("octavo serve", "--model", str(folder), *flags) as process:
        yield f"http://{own_address()}:{process.port}"


def own_address() -> str:
    """One that is not loopback, where this machine has one: the text is hidden on both."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def told(page: Page, **headers: str) -> tuple[bool, str, int]:
    """What the server tells this browser: whether there is text, all of it, and how many tokens the blocks have."""
    state = ViewState()
    for line in page.evaluate(LINES, headers).splitlines():
        state.apply(json.loads(line))
    pieces = [piece for tokens in state.tokens for piece in tokens or ()]
    return state.head["text"], "".join(pieces), len(pieces)


def shown(page: Page) -> str:
    """The text of the request that is selected, block by block, and all else that the page says."""
    ended = page.locator(".request-group summary")
    expect(ended).to_be_visible()
    ended.click()
    page.locator(".request").first.click()
    expect(page.locator(".entry").first).to_be_visible()
    return "".join(page.locator(".entry-text").all_text_contents()) + page.locator("body").inner_text()


# promise: text-view-only
def test_another_machine_sees_blocks_and_no_text(open_page: OpenPage, shared: str) -> None:
    first, second = (open_page(shared, [NO_TLS]).page for _ in range(2))
    first.evaluate(ASK, PROMPT)
    has_text, text, num_tokens = told(second)
    assert not has_text and text == "" and num_tokens > 8, "tokens are counted, and their text is not told"
    assert "garden" not in shown(second)
    has_text, text, _ = told(second, authorization=f"Bearer {ADMIN}")
    assert has_text and PROMPT in text, "the admin key reads it"
    assert not told(second, authorization="Bearer sk-other")[0]


# promise: text-view-only
def test_the_same_machine_sees_text_unless_a_proxy_passed_the_request_on(open_page: OpenPage, server: str) -> None:
    first, second = open_page(server).page, open_page(server).page
    first.evaluate(ASK, PROMPT)
    has_text, text, _ = told(second)
    assert has_text and "garden of Lily" in text and PROMPT in shown(second)  # blocks come in physical order
    proxied = open_page(server, extra_http_headers={"x-forwarded-for": "192.0.2.9"}).page
    has_text, text, _ = told(proxied)
    assert not has_text and text == "" and "garden" not in shown(proxied)
