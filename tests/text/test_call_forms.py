"""The forms of tool calls of Mistral, Granite, Phi-4-mini, Qwen3-Coder, Gemma and gpt-oss: read back however they are cut."""

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.harmony import HarmonySplitter
from octavo.text.reasoning import ReasoningTokens, reasoning_family
from octavo.text.tool_calls import collected, tool_call_family, tool_call_parser
from octavo.text.tools import check_tools, text_parameters
from tests.support.cut import CUTS, cut
from tests.support.tokenizers import DATA
from tests.text.test_reasoning import runs
from tests.text.test_tool_calls import GAPS, NAMES, Written, check_form, parse, told, written

SAID = st.sampled_from(["", "Let me look.", "a [b", "[TOOL_", "<|tool", "[TOOL_CALLS] x", "func"])
LISTS = {  # around a list, for each family; the text behind a tag that is none of its own is no call
    "mistral": ["[TOOL_CALLS]%s", "[TOOL_CALLS] %s"],
    "granite": ["<|tool_call|>%s", "<tool_call>%s", "<tool_call>\n%s\n</tool_call>"],
    "phi4_mini_json": ["<|tool_call|>%s<|/tool_call|>", "functools%s", "<|tool_call|>\n%s"],
}


# promise: tool-call-forms
@given(st.sampled_from(sorted(LISTS)), st.data(), st.lists(written("arguments"), min_size=1, max_size=3), SAID, GAPS, CUTS, st.booleans())
def test_lists_of_calls_come_out_with_the_text_before_them(
    family: str, data: st.DataObject, calls: list[Written], said: str, gap: str, cuts: list[int], stream: bool
) -> None:
    form = data.draw(st.sampled_from(LISTS[family]))
    text = said + gap + form % f"[{f',{gap}'.join(call.text for call in calls)}{gap}]"
    pieces, parser = parse(family, cut(text, cuts), stream)
    expected: list[tuple[object, ...]] = [(said,)] if said else []
    assert told(pieces) == expected + [(index, call.name, call.arguments) for index, call in enumerate(calls)]
    assert parser.num_calls == len(calls)
    check_form(pieces)


ARGUMENTS = st.dictionaries(st.text("ab{}[]\"\\<|> \n", max_size=5), st.text("ab{}[]\"\\<|> \n", max_size=8) | st.integers(), max_size=3)


BETWEEN = st.sampled_from(["[ARGS]", "[CALL_ID]x9[ARGS]", ""])


@given(st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3), BETWEEN, CUTS)
def test_newer_models_of_mistral_name_the_tool_before_its_arguments(
    calls: list[tuple[str, dict[str, object]]], between: str, cuts: list[int]
) -> None:
    text = "".join(f"[TOOL_CALLS]{name}{between}{json.dumps(arguments)}" for name, arguments in calls)
    for stream in (False, True):
        said, read = collected(parse("mistral", cut(f"Hm.{text}", cuts), stream)[0])
        assert said == "Hm." and [(call.name, json.loads(call.arguments)) for call in read] == calls


NO_CALLS = ["rm[ARGS]{}", " no list", "[1]", "weather[ARGS]5", "weather[ARG", ""]


@pytest.mark.parametrize("text", [f"[TOOL_CALLS]{behind}" for behind in NO_CALLS])
def test_a_tag_without_a_call_behind_it_is_text(text: str) -> None:
    for texts in ([text], list(text)):
        assert collected(parse("mistral", texts, stream=True)[0]) == (text, [])


# -- Gemma

LITERALS = st.recursive(
    st.text("ab'\"\\\n,()[]é`\x01", max_size=8) | st.integers() | st.floats(-1e9, 1e9) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab'\"", max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYWORDS = st.dictionaries(st.sampled_from(["city", "days", "x_1"]), LITERALS, max_size=3)


def in_python(name: str, arguments: dict[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def in_one_object(name: str, arguments: dict[str, object]) -> str:
    """As forced calls are."""
    return f"{name}(**{json.dumps(arguments)})"


# promise: tool-call-forms
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), KEYWORDS), min_size=1, max_size=3), st.sampled_from([in_python, in_one_object]),
    st.sampled_from(["[%s]", " [ %s ] ", "Let me look.\n```tool_code\n%s\n```", "```tool_code\n[%s]\n```\n"]), CUTS, st.booleans(),
)  # fmt: skip
def test_calls_in_python_become_json(
    calls: list[tuple[str, dict[str, object]]], write: Callable[..., str], form: str, cuts: list[int], stream: bool
) -> None:
    lines = "\n" if form.startswith("Let") else ", "
    pieces, parser = parse("pythonic", cut(form % lines.join(write(*call) for call in calls), cuts), stream)
    said, read = collected(pieces)
    assert said.strip() == ("Let me look." if form.startswith("Let") else "")
    assert [(call.name, json.loads(call.arguments)) for call in read] == calls
    assert parser.num_calls == len(calls)
    check_form(pieces)


NO_PYTHON = [
    "[1] Smith, [2] Jones", "[weather](https://example.org)", "[rm()]", "[weather(city=__import__('os'))]", "[weather(5)]", "weather()",
    "[weather(city='a', city='b')]", "[weather(ci ty='a')]", "[weather(city='\\U00110000')]", "[weather(**5)]", "[weather(days=1e)]",
    "A [weather()]", "```tool_code\nprint(1)\n```", f"[weather(x={'[' * 100})]", "[weather(x='a'", "[weather(x=1 + 1)]",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_PYTHON)
def test_what_is_no_call_of_an_offered_tool_with_literals_is_text(text: str) -> None:
    for texts in ([text], list(text)):
        assert collected(parse("pythonic", texts, stream=False)[0]) == (text, [])


def test_a_literal_of_any_length_costs_time_in_proportion_to_it() -> None:
    text = "[weather(city='" + "\\x41\\\\" * 20_000 + "', days=[" + "1, " * 20_000 + "1], x=\"" + "'" * 100_000 + '")]'
    started = time.process_time()
    _, (call,) = collected(parse("pythonic", list(text), stream=True)[0])
    assert len(json.loads(call.arguments)["days"]) == 20_001
    assert time.process_time() - started < 20


def test_half_of_a_pair_of_characters_stays_escaped() -> None:
    _, (call,) = collected(parse("pythonic", ["[weather(city='\\ud83d')]"], stream=False)[0])
    assert call.arguments == '{"city": "\\ud83d"}'
    parser = tool_call_parser("qwen3_coder", NAMES, True)
    text = '<tool_call><function=weather><parameter=x>"\\ud83d"</parameter></function></tool_call>'
    assert collected([*parser.push(text), *parser.flush()])[1][0].arguments == '{"x": "\\ud83d"}'


# -- Qwen3-Coder

VALUES = st.text("ab <>/\n\"\\é5", max_size=12).filter(lambda value: value == value.strip("\n") and "</parameter>" not in value)
KEYS = st.lists(st.sampled_from(["city", "days", "x-y"]), unique=True, max_size=3)
TOOLS = check_tools(
    [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
)


# promise: tool-call-forms
@given(st.lists(st.tuples(KEYS, st.lists(VALUES, min_size=3, max_size=3)), min_size=1, max_size=2), CUTS, st.booleans())
def test_parameters_in_tags_become_json(calls: list[tuple[list[str], list[str]]], cuts: list[int], stream: bool) -> None:
    text = "Let me look.\n"
    for keys, values in calls:
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in zip(keys, values))
        text += f"<tool_call>\n<function=weather>\n{inner}</function>\n</tool_call>"
    parser = tool_call_parser("qwen3_coder", NAMES, stream, text_parameters(TOOLS))
    pieces = [piece for part in cut(text, cuts) for piece in parser.push(part)] + parser.flush()
    said, read = collected(pieces)
    check_form(pieces)
    assert said == "Let me look." and [call.name for call in read] == ["weather"] * len(calls)
    for call, (keys, values) in zip(read, calls, strict=True):
        found = json.loads(call.arguments)
        assert list(found) == keys
        for key, value in zip(keys, values):
            assert found[key] == value or (key != "city" and found[key] == json.loads(value))


@pytest.mark.parametrize(
    ("value", "is_text", "read"),
    [("5", False, 5), ("5", True, "5"), ("[1, {}]", False, [1, {}]), ("true", False, True), ("NaN", False, "NaN"), ("x y", False, "x y"),
     ("[" * 100_000, False, "[" * 100_000), ("9" * 5000, False, "9" * 5000)],
)  # fmt: skip
def test_a_value_is_what_the_schema_or_its_looks_say(value: str, is_text: bool, read: object) -> None:
    text = f"<tool_call><function=weather><parameter=x>{value}</parameter></function></tool_call>"
    parser = tool_call_parser("qwen3_coder", NAMES, True, {("weather", "x")} if is_text else ())
    assert json.loads(collected(parser.push(text) + parser.flush())[1][0].arguments) == {"x": read}


# -- gpt-oss

HEAD = "<|start|>assistant<|channel|>"
ANSWER = (
    "<|channel|>analysis<|message|>They ask for the weather.<|end|>"
    f"{HEAD}commentary<|message|>Let me look.<|end|>"
    f'{HEAD}commentary to=functions.weather <|constrain|>json<|message|>{{"city": "Paris"}}<|call|>'
    f'<|start|>assistant to=functions.get-time_2<|channel|>commentary json<|message|>{{}}<|call|>'
    f"{HEAD}final<|message|>It is < 5 |> degrees."
)


# promise: harmony-channels
@given(CUTS)
def test_channels_are_thinking_calls_and_content(cuts: list[int]) -> None:
    splitter, parser = HarmonySplitter(), tool_call_parser("harmony", NAMES, stream=True)
    pieces = [piece for text in cut(ANSWER, cuts) for piece in splitter.push(text)] + splitter.flush()
    assert "".join(piece.text for piece in pieces) == ANSWER
    assert "".join(piece.text for piece in pieces if piece.kind == "reasoning") == "They ask for the weather."
    read = [part for piece in pieces if piece.kind == "content" for part in parser.push(piece.text)] + parser.flush()
    said, calls = collected(read)
    check_form(read)
    assert said == "Let me look.It is < 5 |> degrees."
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Paris"}'), ("get-time_2", "{}")]


CRUMBS = ["<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>", "assistant", "<|call|>", "<|", "x", "{}"]
CRUMBS += [" to=functions.weather", "x" * 199]


@given(st.lists(st.sampled_from(CRUMBS), max_size=14).map("".join), CUTS)
def test_any_cut_gives_the_same_pieces_and_every_character_once(text: str, cuts: list[int]) -> None:
    def split(texts: list[str]) -> list[tuple[str, str]]:
        splitter = HarmonySplitter()
        return runs([piece for part in texts for piece in splitter.push(part)] + splitter.flush())

    pieces = split(cut(text, cuts))
    assert pieces == split([text]) == split(list(text)) and "".join(part for _, part in pieces) == text


@pytest.mark.parametrize("text", ['{"a": 1}', "Hello", "<b>", "<|im_end|>", "<|chan", "<|start|>" + "x" * 300])
def test_an_answer_without_channels_is_content(text: str) -> None:
    for texts in ([text], list(text)):
        splitter = HarmonySplitter()
        assert runs([piece for part in texts for piece in splitter.push(part)] + splitter.flush()) == [("content", text)]


def test_tokens_of_the_analysis_are_counted() -> None:
    tokens = [b"<|channel|>", b"analysis", b"<|message|>", b"Hm", b".", b"<|end|>", b"<|start|>", b"assistant", b"<|channel|>", b"final",
              b"<|message|>", b"Yes"]  # fmt: skip
    counter = ReasoningTokens("", tokens.__getitem__, "harmony")
    counter.push(range(len(tokens)))
    assert counter.count == 11  # to the head of what is no thinking


# -- templates

SOURCES = {
    "mistral": "{{ '[TOOL_CALLS] ' + calls }}", "granite": "respond with <|tool_call|> followed by a JSON list",
    "phi4_mini_json": "'<|tool|>' + tools + '<|/tool|>'", "harmony": "<|channel|>analysis",
    "pythonic": "Example Format: [func_name1(params_name1=params_value1, ...), func_name2(params)]", "none": "<start_of_turn>model",
}  # fmt: skip


@pytest.mark.parametrize("family", SOURCES)
def test_a_template_says_which_form_its_model_writes(family: str) -> None:
    assert tool_call_family("auto", SOURCES[family]) == family
    assert reasoning_family("auto", SOURCES[family]) == ("harmony" if family == "harmony" else "none")
    assert tool_call_family("auto", (DATA / "templates" / "Qwen3-Coder.jinja").read_text(encoding="utf-8")) == "qwen3_coder"
