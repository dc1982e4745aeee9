"""Text of a model on the page: Markdown, code and formulas are set, and nothing that a model says does anything."""

import pytest

from octavo.server_config import ServerConfig
from tests.support.soaked import rarely
from tests.web.chatting import PHONE, answers, scrolls_sideways, send, speaking
from tests.web.conftest import OpenPage

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:
    pytest.skip("tests of the page want playwright: pip install -r requirements/dev.txt", allow_module_level=True)

HOSTILE = """<script>window.struck = 1</script> <img src=x onerror="window.struck = 2">

<iframe src="https://example.org/"></iframe><svg onload="window.struck = 3">

[a](javascript:window.struck=4) [b](data:text/html,<script>window.struck=5</script>) ![c](https://example.org/c.png) [d](https://example.org/d)

<a href="javascript:window.struck=6">e</a> &lt;script&gt; `</code><script>window.struck = 7</script>` abc\u202egnitirw\u202c \u2066x\u2069

| <b onclick=1>f</b> | g |
|---|---|
| <style>body{display:none}</style> | </table><script>window.struck = 8</script> |

$\\href{javascript:window.struck=10}{x}$ $\\class{a}{\\style{color:red}{x}}$ $\\includegraphics{https://example.org/x.png}$ $x^{<b>}$

```html
<script>window.struck = 11</script>
```

```<script>
</pre><script>window.struck = 9</script>
```
"""


# promise: page
def test_what_a_model_says_is_inert(open_stand_in: OpenPage) -> None:
    with speaking(*HOSTILE.splitlines(keepends=True)) as (_, url):
        page = open_stand_in(url, permissions=["clipboard-read", "clipboard-write"]).page
        send(page, HOSTILE)
        answer = answers(page).first
        expect(answer).to_contain_text("first token after")
        made = set(answer.locator(".text *").evaluate_all("nodes => nodes.map(node => node.tagName.toLowerCase())"))
        html = {"p", "a", "code", "pre", "div", "span", "button", "table", "thead", "tbody", "tr", "th", "td"}
        assert made <= html | {"math", "msup", "mi", "mrow", "mo"}
        expect(answer.locator(".code .code-keyword").first).to_have_text("script")
        answer.locator(".text").get_by_role("button", name="Copy").nth(1).click()
        expect(answer.locator(".text button")).to_have_text(["Copy", "Copied"])
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


RICH = r"""
```python
def double(number):  # a long line
    return "twice" and number * 2, "0123456789 0123456789 0123456789 0123456789 0123456789 0123456789 0123456789 0123456789 0123456789"
```

- [x] done
- [ ] to do

| left | middle | right |
|:-----|:------:|------:|
| a    |   b    |     c |

For $x \ge 0$ it is \(\sqrt{x}\), and costs $5 or $6.

\[
a
- b = \frac{1}{2}
\]
"""


# promise: page-markdown
def test_code_tasks_tables_and_formulas_are_set(open_stand_in: OpenPage) -> None:
    """The libraries for code and formulas are loaded with the first of each."""
    with speaking("plain") as (llm, url):
        page = open_stand_in(url, viewport={"width": 1024, "height": 768}).page
        loaded: list[str] = []
        page.on("request", lambda request: loaded.append(request.url.rpartition("/")[2]))
        send(page, "Hello")
        expect(answers(page).first).to_contain_text("first token after")
        assert not [name for name in loaded if "min.js" in name]
        llm.pieces = tuple(RICH.splitlines(keepends=True))
        send(page, "More")
        answer = answers(page).nth(1)
        expect(answer).to_contain_text("first token after")
        parts = {"def": "keyword", "double": "title", "# a long line": "comment", "2": "number", '"twice"': "string"}
        for text, kind in parts.items():
            expect(answer.locator(f".code-{kind}").filter(has_text=text).first).to_be_visible()
        bar = "node => [node.scrollWidth > node.clientWidth, getComputedStyle(node, '::-webkit-scrollbar').height]"
        assert answer.locator("pre").evaluate(bar) == [True, "8px"]
        done, undone = answer.get_by_role("checkbox").all()
        expect(done).to_be_checked()
        expect(undone).not_to_be_checked()
        sides = answer.locator("td").evaluate_all("nodes => nodes.map((node) => getComputedStyle(node).textAlign)")
        assert sides == ["left", "center", "right"]
        formulas = answer.locator("math")
        expect(formulas).to_have_count(3)
        found = formulas.evaluate_all("nodes => nodes.map((node) => [node.namespaceURI.split('/').at(-1), node.getAttribute('display')])")
        assert found == [["MathML", None], ["MathML", None], ["MathML", "block"]]
        expect(answer).to_contain_text("and costs $5 or $6.")
        assert sorted(name for name in loaded if "min.js" in name) == ["highlight.min.js", "temml.min.js"]


@pytest.mark.parametrize(
    "piece", [*rarely("x" * 1000), "> " * 500, *rarely("[" * 1000, "**a _b " * 150)], ids=["line", "quotes", "brackets", "emphasis"]
)
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


def test_thinking_is_folded(open_stand_in: OpenPage) -> None:
    with speaking("<think>hidden depths", "</think>", "shown", config=ServerConfig(reasoning_parser="think", inspector=False)) as (_, url):
        page = open_stand_in(url).page
        send(page, "Hello")
        expect(answers(page).first.locator("> .text")).to_have_text("shown")
        thought = page.get_by_text("hidden depths")
        expect(thought).to_be_hidden()
        page.get_by_text("Thinking").click()
        expect(thought).to_be_visible()
