"""Tool calls read out of answers: however cut, streamed or whole; what is no call is text, in time that grows with it."""

import itertools
import json
import re
import time
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.call_reader import JsonScanner, NotJson, ToolCallDelta
from octavo.text.prompt import ChatTemplate
from octavo.text.reasoning import reasoning_splitter
from octavo.text.tool_calls import FAMILIES, AnswerPiece, CallParser, ToolCall, collected, tool_call_family, tool_call_parser
from tests.support.cut import CUTS, cut
from tests.support.soaked import one_in, rarely
from tests.support.tokenizers import DATA

NAMES = ("weather", "get-time_2")
WORDS = st.text(st.sampled_from('ab<>{}"\\ \n:;é'), max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8)
STYLES = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])


@dataclass
class Written:
    """A call as a model may write it."""

    text: str
    name: str
    arguments: str


@st.composite
def written(draw: st.DrawFn, key: str) -> Written:
    name, style = draw(st.sampled_from(NAMES)), draw(STYLES)
    arguments = json.dumps(draw(st.dictionaries(WORDS, VALUES, max_size=3)), **style)
    others = draw(st.sampled_from([[], ['"type": "function"'], ['"id": [1, {}]']]))
    parts = [f'"name": {json.dumps(name)}', f'"{key}": {arguments}', *others]
    return Written("{" + ", ".join(draw(st.permutations(parts))) + "}", name, arguments)


def parse(family: str, texts: list[str], stream: bool) -> tuple[list[AnswerPiece], CallParser]:
    parser = tool_call_parser(family, NAMES, stream)
    return [piece for text in texts for piece in parser.push(text)] + parser.flush(), parser


def told(pieces: list[AnswerPiece]) -> list[tuple[object, ...]]:
    """Text and calls in their order, each joined, without ids."""
    story: list[tuple[object, ...]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            if piece.id is not None:
                story.append((piece.index, piece.name, ""))
            index, name, arguments = story[-1]
            story[-1] = (index, name, f"{arguments}{piece.arguments}")
            assert index == piece.index and name
        else:
            assert piece
            story[-1:] = [(story[-1][0] + piece,)] if story and len(story[-1]) == 1 else [*story[-1:], (piece,)]  # type: ignore[operator]
    return story


def check_form(pieces: list[AnswerPiece]) -> None:
    """As OpenAI streams them: id and name once, first, with no arguments; indices count up."""
    deltas = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    firsts = [delta for delta in deltas if delta.id is not None]
    assert [delta.index for delta in firsts] == list(range(len(firsts)))
    assert all(re.fullmatch(r"call_[0-9a-z]{24}", str(delta.id)) and delta.name in NAMES and delta.arguments == "" for delta in firsts)
    assert all(delta.name is None and delta.arguments for delta in deltas if delta.id is None)
    assert len({delta.id for delta in firsts}) == len(firsts)


GAPS = st.sampled_from(["", "\n", "\n\n", " "])
LEFT = st.sampled_from(["", "\n", "; hm"])
SAID = st.sampled_from(["", "Let me look.", "a < b", "{}", "<tool_", "x </tool_call> y"])


@given(st.lists(st.tuples(SAID, GAPS, written("arguments"), st.booleans(), GAPS), min_size=1, max_size=3), SAID, CUTS, st.booleans())
def test_hermes_calls_come_out_with_the_text_around_them(
    parts: list[tuple[str, str, Written, bool, str]], last: str, cuts: list[int], stream: bool
) -> None:
    text, expected = "", []
    for index, (said, gap, call, closed, inner) in enumerate(parts):
        text += f"{said}{gap}<tool_call>{inner}{call.text}" + (f"{inner}</tool_call>" if closed else "")
        expected += [(said,), (index, call.name, call.arguments)]
    text, expected = text + last + "\n", [*expected, (f"{last}\n",)] if last else expected
    pieces, parser = parse("hermes", cut(text, cuts), stream)
    assert told(pieces) == [entry for entry in expected if entry != ("",)] and parser.num_calls == len(parts)
    check_form(pieces)


@given(st.lists(written("parameters"), min_size=1, max_size=3), st.booleans(), GAPS, CUTS, st.booleans(), LEFT)
def test_llama_calls_are_the_whole_answer(calls: list[Written], tagged: bool, gap: str, cuts: list[int], stream: bool, end: str) -> None:
    text = gap + ("<|python_tag|>" if tagged else "") + f"{gap};{gap}".join(call.text for call in calls) + end
    pieces, _ = parse("llama3_json", cut(text, cuts), stream)
    expected: list[tuple[object, ...]] = [(index, call.name, call.arguments) for index, call in enumerate(calls)]
    assert told(pieces) == expected + ([(end,)] if end.strip() else [])
    check_form(pieces)


CRUMBS = ["<tool_call>", "</tool_call>", '{"name": "weather", "arguments": ', '"parameters"', '{"a": [1', "]}", "}", '"', "\\", "\n"]
CRUMBS += ['{"name": "rm"', ", ", '"name": "weather"', "{", "x" * 401, "<tool", "; ", " " * 9, "tru", "-1.5e", "\\u00", "<|python_tag|>"]
CRUMBS += ["[TOOL_CALLS]", "[", "weather[ARGS]", "<|tool_call|>", "<|/tool_call|>", "functools", "<function=weather>", "</function>"]
CRUMBS += ["<function=", "<parameter=x>", "</parameter>", "<|call|>", "<|start|>assistant"]
CRUMBS += ["<|channel|>commentary to=functions.weather<|message|>"]
SOUP = st.lists(st.sampled_from(CRUMBS), max_size=14).map("".join)


@given(st.sampled_from(sorted(FAMILIES)), SOUP, CUTS)
def test_any_text_comes_out_the_same_however_it_is_cut(family: str, text: str, cuts: list[int]) -> None:
    stories = {}
    for stream in (False, True):
        pieces, parser = parse(family, cut(text, cuts), stream)
        stories[stream] = told(pieces)
        assert stories[stream] == told(parse(family, [text], stream)[0]) == told(parse(family, list(text), stream)[0])
        check_form(pieces)
        standing = [entry for entry in stories[stream] if len(entry) == 3 and is_json(str(entry[2]))]
        assert len(standing) == parser.num_calls
        if not any(len(entry) == 3 for entry in stories[stream]):
            assert "".join(str(entry[0]) for entry in stories[stream]) == text
    calls = {stream: [entry for entry in story if len(entry) == 3] for stream, story in stories.items()}
    assert all(is_json(str(entry[2])) for entry in calls[False])
    assert [entry[1:] for entry in calls[True] if is_json(str(entry[2]))] == [entry[1:] for entry in calls[False]]


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
NO_CALLS = [
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',  # nobody offered it
    '<tool_call>{"name": "weather", "arguments": {"city": "Par',
    '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "weather"}</tool_call>',
    '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "name": "weather", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"a": __import__("os").system("id")}}</tool_call>',
    "<tool_call>weather(city='Paris')</tool_call>",
    '<tool_call>{"name": "weather", "arguments": {"a": "line\nbreak"}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"a": ' + "[" * 70,
    '<tool_call>{"name": "weather", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}",  # too deep to be read by everyone
    f'<tool_call>{{"{"x" * 400}": 0, {CALL[1:]}',
    "<tool_call>",
    "  <tool_call",
    "",
]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_text_to_the_last_character(text: str) -> None:
    assert collected(parse("hermes", [text], stream=False)[0]) == (text, [])
    pieces, parser = parse("hermes", list(text), stream=True)
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    begun = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    shown = "".join(delta.arguments for delta in begun) + said  # of a call that broke later: its arguments up to there, then text
    assert text.endswith(shown) and parser.num_calls == 0 and (begun or shown == text)


@pytest.mark.parametrize(
    ("family", "text", "said", "num_calls"),
    [
        ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>", "", 1),  # a brace too few
        ("hermes", f"<tool_call>{CALL}}}</tool_call>", "}</tool_call>", 1),
        ("hermes", f"<tool_call>{{'name'<tool_call>{CALL}", "<tool_call>{'name'", 1),
        ("hermes", f'<tool_call>{{"{"x" * 399}<tool_call>{CALL}', '<tool_call>{"' + "x" * 399, 1),  # no key is that long
        ("hermes", f"<tool_call>{CALL}\n</tool_", "", 1),
        ("hermes", f"<tool_call>{CALL}\n<", "\n<", 1),
        ("llama3_json", f"Sure: {CALL}", f"Sure: {CALL}", 0),
        ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', 0),
        ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", 0),
        ("llama3_json", f"{CALL}; print(1); {CALL}", "; print(1); " + CALL, 1),
        ("llama3_json", f"{CALL};", "", 1),
        ("none", f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", 0),
    ],
)
def test_a_call_stands_by_its_name_and_arguments(family: str, text: str, said: str, num_calls: int) -> None:
    for texts, stream in itertools.product(([text], list(text)), (False, True)):
        found, calls = collected(parse(family, texts, stream)[0])
        assert found == said
        assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Paris"}')] * num_calls


def test_behind_a_call_that_broke_a_llama_says_nothing_but_text() -> None:
    text = f'{{"name": "weather", "arguments": {{"a": [1; {CALL}'
    assert collected(parse("llama3_json", [text], stream=False)[0]) == (text, [])
    begun, parser = parse("llama3_json", [text], stream=True)
    assert told(begun) == [(0, "weather", '{"a": [1'), (f"; {CALL}",)] and parser.num_calls == 0


def test_arguments_stream_as_they_come_and_without_tools_all_is_text() -> None:
    parser = tool_call_parser("hermes", NAMES, stream=True)
    assert parser.push('<tool_call>{"name": "weather", "arguments": ') == []
    first, piece = parser.push('{"ci')
    assert isinstance(first, ToolCallDelta) and first.name == "weather" and piece == ToolCallDelta(0, '{"ci')
    assert parser.push('ty": "P') == [ToolCallDelta(0, 'ty": "P')]
    assert collected([first, piece, ToolCallDelta(0, "...")]) == ("", [ToolCall(str(first.id), "weather", '{"ci...')])
    assert tool_call_parser("hermes", [], stream=True).push("<tool_call>") == ["<tool_call>"]


ARGUMENTS = '{"name": "weather", "arguments": {"a": ['
HOSTILE = [
    *[("hermes", "", crumb) for crumb in ("[", "<", "<tool_call>", "\n<tool_call>{", " ")],
    *[("hermes", "<tool_call>" + ARGUMENTS, crumb) for crumb in ("[", "1,", '{"a": [], "b": "c"}, ', "import os\n", "<tool_call>")],
    *[("hermes", f"<tool_call>{ARGUMENTS}\"", crumb) for crumb in ('\\"', "<tool_call>")],
    ("hermes", "<tool_call>{", " "),
    ("hermes", f"<tool_call>{CALL}", "</tool_call> "),
    *[("llama3_json", "", crumb) for crumb in ("[", "{", ";", " ", "<|python_tag|>")],
    ("llama3_json", ARGUMENTS, "[[],"),
    ("llama3_json", CALL, ";"),
]


@pytest.mark.parametrize(("family", "head", "crumb"), one_in(2, HOSTILE))
@pytest.mark.timed("CPU time that grows linearly with the text")
def test_a_hostile_megabyte_is_read_in_time_that_grows_with_it(family: str, head: str, crumb: str) -> None:
    def seconds(size: int, step: int) -> float:
        text = head + crumb * (size // len(crumb))
        start = time.process_time()
        parse(family, [text[at : at + step] for at in range(0, len(text), step)], stream=step == 64)
        return time.process_time() - start

    assert seconds(2**20, 64) < 2  # under 0.8 where it was written, on a machine with other work
    half, whole = seconds(2**19, 2**20), seconds(2**20, 2**20)
    assert whole < 2 and whole < 3 * half + 0.1


@given(VALUES, STYLES, WORDS, st.integers(0, 20), CUTS)
def test_the_scanner_takes_what_json_takes(value: object, style: dict[str, object], noise: str, place: int, cuts: list[int]) -> None:
    text = json.dumps([value], **style)  # type: ignore[arg-type]
    for tried in (text, text[:place] + noise + text[place:], text[:place] + text[place + 1 :]):
        assert scans(cut(tried + "!", cuts)) == json_ends(tried)


NOT_JSON = ["[1 2]", "[1,]", "[,1]", "[1,,2]", '{"a": "b": 1, "c": 2}', '{"a": 1,}', '{"a" 1}', "{1: 2}", '["a": 1, 2]', '{"a", 1}']


@pytest.mark.parametrize("text", NOT_JSON)
def test_nor_does_the_scanner_take_more(text: str) -> None:
    assert scans([text]) == scans(list(text)) == json_ends(text) is None


def json_ends(text: str) -> int | None:
    try:
        return json.JSONDecoder().raw_decode(text.lstrip())[1] + len(text) - len(text.lstrip())
    except ValueError:
        return None


def scans(texts: list[str]) -> int | None:
    """Where the value ends, if it does."""
    scanner, read = JsonScanner(), 0
    for text in texts:
        try:
            read += scanner.take(text)
        except NotJson:
            return None
        if scanner.complete:
            return read
    return None


def test_templates_say_which_form_their_models_write() -> None:
    spoken = {file.stem: tool_call_family("auto", file.read_text(encoding="utf-8")) for file in (DATA / "templates").glob("*.jinja")}
    hermes = {"MiMo-VL", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-VL-Instruct", "Qwen3-VL-Thinking"}
    hermes |= {"Qwen3_from_tokenizer_config"}
    assert {name for name, family in spoken.items() if family == "hermes"} == hermes
    assert {name for name, family in spoken.items() if family == "qwen3_coder"} == {"Qwen3-Coder", "Qwen3.5-4B"}
    assert {family for name, family in spoken.items() if name not in hermes} == {"qwen3_coder", "none"}  # or a form of their own
    for source in ("{{ '<|python_tag|>' + x }}", """{{- 'Respond in the format {"name": function name, "parameters": dictionary' }}"""):
        assert tool_call_family("auto", source) == "llama3_json"
    assert tool_call_family("llama3_json", "<tool_call>\n{\"name\"") == "llama3_json" and tool_call_family("auto", None) == "none"


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate((DATA / "templates" / f"{name}.jinja").read_text(encoding="utf-8"), name, "", "")


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", *rarely("Qwen3-VL-Instruct", "MiMo-VL", "Qwen-QwQ-32B")])
@given(said=SAID.map(str.strip), calls=st.lists(st.dictionaries(WORDS, VALUES, max_size=2), min_size=1, max_size=3), cuts=CUTS)
def test_what_a_template_writes_of_calls_is_read_back(name: str, said: str, calls: list[dict[str, object]], cuts: list[int]) -> None:
    template = template_of(name)
    tool_calls = [{"id": "x", "type": "function", "function": {"name": "weather", "arguments": arguments}} for arguments in calls]
    asked = {"role": "user", "content": "?"}
    prompt = template.render([asked], variables={"enable_thinking": False})
    text = template.render([asked, {"role": "assistant", "content": said, "tool_calls": tool_calls}], add_generation_prompt=False)
    answer = text.rpartition("<|im_start|>assistant")[2].removeprefix("\n").removesuffix("<|im_end|>\n")
    splitter = reasoning_splitter("think", prompt)
    pieces = [piece for text in cut(answer, cuts) for piece in splitter.push(text)] + splitter.flush()
    found, read = collected(parse("hermes", [piece.text for piece in pieces if piece.kind == "content"], stream=True)[0])
    assert found == said and [json.loads(call.arguments) for call in read] == calls
