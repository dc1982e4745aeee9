"""Section E as far as it is of tools and templates: the stories server's template does harm where a message asks for it."""

import json
from typing import Any

from tests.support.bad_inputs_row import CHAT, HELLO, RESPONSES, SOUND, Attempt, Row, acted, fields, row
from tests.support.bad_inputs_watch import Watched

HARM = {
    "escape": "{{ cycler.__init__.__globals__.os.popen('touch escaped') }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "loop": "{% for i in range(10**9) %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "repeat": "{{ 'a' * 10**9 }}",
    "grow": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "recurse": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}
WITH_TOOLS = "{% if tools %}Tools: {% endif %}"
TEMPLATE = (
    "{% set asked = messages[0].content %}"
    + "".join(f"{'{% if' if number == 0 else '{% elif'} asked == '{name}' %}}{harm}" for number, (name, harm) in enumerate(HARM.items()))
    + f"{{% else %}}{{{{ bos_token }}}}{WITH_TOOLS}"
    + "{% for message in messages %}{{ message.content }}{% endfor %}{% endif %}"
)


def tool(name: object = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def with_schema(**schema: Any) -> list[object]:
    return [tool(parameters={"type": "object", "properties": {"x": schema}})]


TOOLS: list[Any] = [
    with_schema(pattern="("),
    with_schema(pattern=5),
    with_schema(type=5),
    with_schema(type="str"),
    with_schema(**{"$ref": "file:///etc/passwd"}),
    [tool("x" * 2**20)],
    [tool("a"), tool("a")],
    [tool(5)],
    [tool("a.b")],
    [tool(f"f{number}") for number in range(10_000)],
    [5],
    [{"type": "function"}],
    5,
]
CHOICES = ["sometimes", {"type": "function", "function": {"name": "f"}}, 5, "required"]


def _calls_in_the_text(server: Watched) -> None:
    """The model may write nothing but brackets, and that is what is answered: text."""
    ids = server.ask("POST", "/tokenize", {"prompt": "[", "add_special_tokens": False}).json["tokens"]
    for stream in (False, True):
        body = SOUND[CHAT] | {"tools": [tool()], "allowed_token_ids": ids[-1:], "max_tokens": 200, "stream": stream}
        reply = server.ask("POST", CHAT, body)
        assert reply.status == 200 and b"tool_calls" not in reply.body
        text = _streamed(reply.body) if stream else reply.json["choices"][0]["message"]["content"]
        assert text.strip() == "[" * 200, text


def _streamed(body: bytes) -> str:
    lines = [line[6:] for line in body.decode().split("\r\n") for line in line.split("\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for line in lines for choice in json.loads(line)["choices"])


def _no_place_for_tools(server: Watched) -> None:
    """A template that does not write tools into the prompt: the model would never hear of them."""
    for path, offered in ((CHAT, tool()), (RESPONSES, {"type": "function", "name": "weather"})):
        for choice in (None, "auto", "required"):
            reply = server.ask("POST", path, SOUND[path] | {"tools": [offered], "tool_choice": choice})
            assert reply.status == 400 and (reply.error["param"], reply.error["code"]) == ("tools", "unsupported_parameter"), reply
            assert "has no place for tools" in reply.error["message"] and "--chat-template" in reply.error["message"]
        assert server.ask("POST", path, SOUND[path] | {"tools": [offered], "tool_choice": "none"}).status == 200


def _harm(*names: str) -> list[Attempt]:
    return [Attempt(CHAT, {"messages": [{"role": "user", "content": name}]}, 400, "messages") for name in names] + [
        Attempt(RESPONSES, {"input": names[0]}, 400, "input")
    ]


ROWS: list[Row] = [
    row(77, "tools", lambda: [Attempt(CHAT, SOUND[CHAT] | {"tools": value}, 400, "tools") for value in TOOLS]
        + [Attempt(CHAT, {"messages": HELLO, "tool_choice": value}, 400, "tool_choice") for value in CHOICES]
        + fields("functions", [[{"name": "f"}]], CHAT)),
    acted(77, "tools for a template that has none", _no_place_for_tools, "optimized"),
    acted(78, "brackets for an answer", _calls_in_the_text),
    row(79, "a template that reaches out", _harm("escape", "classes")),
    row(80, "a template without end", _harm("loop", "repeat", "grow", "recurse", "loops")),
]  # fmt: skip
