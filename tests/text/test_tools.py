"""Tools at the door: what is wrong with one is answered by its place; a forced call is one the parser reads back."""

import json
import random
import time
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.text.reasoning import ReasoningSplitter, behind_thought
from octavo.text.tool_calls import FAMILIES, collected, forced_call, tool_call_parser
from octavo.text.tools import MAX_DEPTH, ToolChoice, check_tool_choice, check_tools, pattern_error


def tool(name: object = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def with_schema(**schema: Any) -> list[object]:
    return [tool(parameters={"type": "object", "properties": {"type": {"type": "string"}, "x": schema}})]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


X = "tools[0].function.parameters.properties.x"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([tool(f"f{index}") for index in range(129)], "tools"),
        ([tool(f"f{index}") for index in range(10_000)], "tools"),
        (["weather"], "tools[0]"),
        ([{"type": "web_search"}], "tools[0]"),
        ([{"type": "function", "function": "weather"}], "tools[0]"),
        ([tool(5)], "tools[0].function.name"),
        ([tool("a.b")], "tools[0].function.name"),
        ([tool("x\n")], "tools[0].function.name"),
        ([tool("x" * 65)], "tools[0].function.name"),
        ([tool("x" * 2**20)], "tools"),
        ([tool("a"), tool("b"), tool("a")], "tools[2].function.name"),
        ([tool(description=["?"])], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters"),
        ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties"),
        (with_schema(type=5), f"{X}.type"),
        (with_schema(type="str"), f"{X}.type"),
        (with_schema(type=[]), f"{X}.type"),
        (with_schema(type=["string", {}]), f"{X}.type"),
        (with_schema(pattern="("), f"{X}.pattern"),
        (with_schema(pattern=5), f"{X}.pattern"),
        (with_schema(patternProperties={"^+a": {}}), f"{X}.patternProperties"),
        (with_schema(items={"anyOf": [{}, {"not": {"enum": []}}]}), f"{X}.items.anyOf[1].not.enum"),
        (with_schema(anyOf={}), f"{X}.anyOf"),
        (with_schema(items=5), f"{X}.items"),
        (with_schema(required=[5]), f"{X}.required"),
        (with_schema(minLength=-1), f"{X}.minLength"),
        (with_schema(maxItems=True), f"{X}.maxItems"),
        (with_schema(**{"$ref": "file:///etc/passwd"}), f"{X}.$ref"),
        (with_schema(**{"$ref": 5}), f"{X}.$ref"),
        (with_schema(**deep(MAX_DEPTH - 1)), "tools[0].function.parameters"),
        (with_schema(**deep(1_000)), "tools[0].function.parameters"),
        (with_schema(enum=list(range(10**6))), "tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_tool_is_named_by_its_place(tools: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_tools(tools)
    assert caught.value.param == param and len(str(caught.value)) < 300


def test_good_tools_come_back_as_templates_want_them() -> None:
    given = with_schema(type=["string", "null"], pattern=r"^\p{L}+$", maxLength=5, enum=["a"], **{"$ref": "#/$defs/y"})
    assert check_tools(given) == given and check_tools(None) == check_tools([]) == []
    assert check_tools([tool(description=None, parameters=None, strict=True)]) == [tool(strict=True)]
    assert check_tools(with_schema(**deep(MAX_DEPTH - 2)))
    assert len(check_tools([tool(f"f{index}") for index in range(128)])) == 128


def test_a_choice_is_of_the_tools_there_are() -> None:
    tools = check_tools([tool("a"), tool("b")])
    assert check_tool_choice(None, tools) == check_tool_choice("auto", tools) == ToolChoice("auto")
    assert check_tool_choice(None, []) == check_tool_choice("auto", []) == check_tool_choice("none", tools) == ToolChoice("none")
    assert check_tool_choice("required", tools).offered(tools) == tools and ToolChoice("none").offered(tools) == []
    named = {"type": "function", "function": {"name": "b"}}
    assert check_tool_choice(named, tools) == ToolChoice("required", "b")
    assert ToolChoice("required", "b").offered(tools) == [tool("b")]
    for choice in ("yes", 5, {}, [], {"type": "function"}, {"type": "function", "function": {"name": "c"}}):
        with pytest.raises(RequestError) as caught:
            check_tool_choice(choice, tools)
        assert caught.value.param == "tool_choice"
    for choice in ("required", named):
        with pytest.raises(RequestError, match="there are no tools"):
            check_tool_choice(choice, [])


def test_patterns_nobody_takes_are_told_from_those_some_do() -> None:
    for wrong in ("(", ")", "[", "a)", "*a", "^+a", "^{2}x", "a**", "a|*", "(?", "(?i)a", "\\", "a{2,1}", "(?:", "[^", "(*)", "[a-z"):
        assert pattern_error(wrong), wrong
    for right in ("", "a", r"^\d{3}-\p{L}+$", "(?<n>a)(?P<m>b)", "(?=a)b(?!c)(?<=d)(?<!e)", "a{,3}", "a{2,}?", "a{1,2}", "[]a]", r"[\]]*"):
        assert pattern_error(right) is None, right
    start = time.process_time()
    assert pattern_error("(" * 100_000) and pattern_error("[a" * 50_000) and pattern_error("{" * 100_000) is None
    assert time.process_time() - start < 2


BYTES = llguidance.LLTokenizer("byte")
TOOLS = check_tools(
    [
        tool("ping"),
        tool("wait", parameters={"properties": {"how": {"enum": ["long", 'é"\\']}, "n": {"type": "integer", "maximum": 9, "minimum": -1}}}),
        tool("say", parameters={"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"maxLength": 3, "type": "string"}}}),
    ]
)
NAMES = [tool["function"]["name"] for tool in TOOLS]  # type: ignore[index]
for each in TOOLS[1:]:
    each["function"]["parameters"] |= {"additionalProperties": False}  # type: ignore[index]


def allowed(grammar: str, seed: int) -> str:
    """Some text that the grammar allows, to its end."""
    matcher, chance, text = llguidance.LLMatcher(BYTES, grammar), random.Random(seed), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    while not (matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.5)):
        mask = matcher.compute_logit_bias()
        token = chance.choice([token for token in range(256) if mask[token]])
        matcher.consume_token(token)
        text.append(token)
    return text.decode()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("parallel", [False, True])
def test_every_text_a_forced_call_allows_is_read_back_as_calls(family: str, parallel: bool) -> None:
    grammar = behind_thought(forced_call(family, TOOLS, parallel), "none", "")
    counts, called = set(), set()
    for seed in range(30):
        said, calls = collected(_read(family, allowed(grammar, seed)))
        assert said == "" and calls and all(isinstance(json.loads(call.arguments), dict) for call in calls)
        counts.add(len(calls))
        called |= {call.name for call in calls}
    assert called == set(NAMES) and (counts == {1}) == (not parallel)


def _read(family: str, text: str) -> list[Any]:
    parser = tool_call_parser(family, NAMES, stream=True)
    return [*parser.push(text), *parser.flush()]


def takes(grammar: str, text: str) -> bool:
    matcher, data = llguidance.LLMatcher(BYTES, grammar), list(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


FORMS = {
    "llama3_json": "%s", "mistral": "[TOOL_CALLS][%s]", "granite": "<|tool_call|>[%s]", "phi4_mini_json": "<|tool_call|>[%s]<|/tool_call|>",
}  # fmt: skip


def written(family: str, name: str, arguments: dict[str, Any]) -> str:
    if family == "pythonic":
        return f"[{name}(**{json.dumps(arguments, ensure_ascii=False)})]"
    key = "parameters" if family == "llama3_json" else "arguments"
    return FORMS.get(family, "<tool_call>\n%s\n</tool_call>") % json.dumps({"name": name, key: arguments}, ensure_ascii=False)


@settings(max_examples=20)
@given(st.sampled_from(sorted(FAMILIES.keys() - {"harmony"})), st.text("aé\n\"\\🙂", max_size=3))
def test_a_forced_call_is_one_of_these_as_templates_write_it(family: str, word: str) -> None:
    grammar = behind_thought(forced_call(family, TOOLS, parallel=False), "none", "")
    call = written(family, "say", {"x": word})
    assert takes(grammar, call)
    assert not takes(grammar, call.replace('"x": ', '"x":  '))
    for name, arguments in (("rm", {"x": word}), ("say", {"x": word + "1234"}), ("say", {"y": word})):
        assert not takes(grammar, written(family, name, arguments))
    assert not takes(grammar, "Sure. " + call) and not takes(grammar, "")


# promise: forced-call-whole
@pytest.mark.parametrize(
    ("parameters", "may_add"),
    [
        ({"properties": {"x": {"type": "integer"}}, "required": ["x"], "title": "X"}, False),
        ({"properties": {"x": {"type": "integer"}}, "additionalProperties": True}, True),
        ({"properties": {"x": {"type": "integer"}}, "required": ["y"]}, True),
        ({}, True),
    ],
)
def test_a_forced_call_has_the_parameters_that_are_listed(parameters: dict[str, object], may_add: bool) -> None:
    tools = check_tools([{"type": "function", "function": {"name": "say", "parameters": parameters}}])
    grammar = f"start: answer\n{forced_call('hermes', tools, parallel=False)}"
    assert takes(grammar, written("hermes", "say", {"x": 1})) != ("y" in parameters.get("required", ()))  # type: ignore[operator]
    assert takes(grammar, written("hermes", "say", {"x": 1, "y": 2})) == may_add


@pytest.mark.parametrize(("prompt", "thought", "may_skip"), [("", "<think>", True), ("<think>\n", "", False)])
def test_a_model_may_think_before_a_forced_call(prompt: str, thought: str, may_skip: bool) -> None:
    grammar = behind_thought(forced_call("hermes", TOOLS, parallel=True), "think", prompt)
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    text = f"{thought}\nwhich < one? </thin\n</think>\n\n{call}"
    assert takes(grammar, text) and takes(grammar, call) == may_skip
    assert not takes(grammar, f"{thought}hm</think> Sure. {call}")
    splitter = ReasoningSplitter(prompt)
    content = "".join(piece.text for piece in splitter.push(text) + splitter.flush() if piece.kind == "content")
    assert content == call
    closed = behind_thought(forced_call("hermes", TOOLS, parallel=True), "think", "<think>\n\n</think>\n\n")
    assert takes(closed, call) and not takes(closed, text)


def test_a_model_without_a_form_cannot_be_forced() -> None:
    with pytest.raises(RequestError, match="--tool-call-parser") as caught:
        forced_call("none", TOOLS, parallel=True)
    assert caught.value.param == "tool_choice"
