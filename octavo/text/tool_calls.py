"""Tool calls: parsers for the forms in which models write them, and a grammar that forces a call.

    family = tool_call_family("auto", template)                     --tool-call-parser
    parser = tool_call_parser(family, names, stream=True)           push(delta) -> text and ToolCallDeltas, then flush()
    grammar = forced_call(family, tools, parallel=True)             for tool_choice "required" or a named tool

A family of models says where a call may begin; from there a `CallReader` reads it. Text that turns out to be no call is given
out as text, every character of it. Each character is read a fixed number of times at most, so the cost grows with the text.

Here are the forms of Hermes, Llama 3 and lists behind a tag, each with the rules (Lark) of a grammar. `harmony.py` and
`python_calls.py` have other forms, and `xml_calls.py` reads the calls of Qwen3-Coder.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import RequestError
from octavo.text.call_parser import AnswerPiece, CallParser
from octavo.text.call_reader import ToolCallDelta
from octavo.text.harmony import CALL, CHANNEL, MESSAGE, HarmonyParser, harmony_grammar
from octavo.text.python_calls import PYTHON_TEMPLATE, PythonParser
from octavo.text.tags import SPACE, half_tag, tag_start
from octavo.text.xml_calls import XML_TEMPLATE, EitherReader, Texts

# -- Hermes and Qwen: calls stand anywhere in an answer
#
#     Let me look.
#     <tool_call>
#     {"name": "weather", "arguments": {"city": "Paris"}}
#     </tool_call>
#
# White space next to the tags belongs to them. A call is complete with its object: the closing tag may be missing.

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# in a template's source a new line may be written as one or as \n, and quotes with a backslash; others have XML in the tag
HERMES_TEMPLATE = re.compile(r"<tool_call>(?:\\n|\s)*\{\\?[\"'](?:name|arguments)")


class HermesParser(CallParser):
    def __init__(self, names: Collection[str], stream: bool, texts: Texts | None = None) -> None:
        """`texts`: of the parameters in tags, which may stand instead of an object (Qwen3-Coder); None: they may not"""
        super().__init__(names, stream)
        self._texts = texts

    def _begin(self, head: str, name: str | None = None) -> None:
        if self._texts is None:
            super()._begin(head, name)
        else:
            self._call = EitherReader(head, self._num_given, self._names, self._stream, self._texts)

    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        if self._behind_call and (end := self._closing(text, at, CLOSE)) > at:
            return end
        place = text.find(OPEN, at)
        end = half_tag(text, at, OPEN) if place < 0 else tag_start(text, at, place)
        self._say(text[at:end], pieces)
        if place < 0:
            self._hold(text[end:])
            return len(text)
        self._begin(text[end : place + len(OPEN)])
        return place + len(OPEN)

    def _is_text_at_the_end(self, held: str) -> bool:
        return OPEN.startswith(held.lstrip(SPACE)) and bool(held.strip(SPACE))


def hermes_grammar(calls: list[str], parallel: bool) -> str:
    """Returns the rule `answer` (Lark) for one call or several. `calls`: the rules of their objects."""
    again = '("\\n" call)*' if parallel else ""
    return f'answer: call {again}\ncall: "{OPEN}\\n" ({" | ".join(calls)}) "\\n{CLOSE}"\n'


# -- Llama 3: the whole answer is JSON, with `<|python_tag|>` in front or without it
#
#     {"name": "weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}
#
# An answer that begins otherwise is text to its end. So is everything after something that is no call.

PYTHON_TAG, SEPARATOR = "<|python_tag|>", ";"
LLAMA_TEMPLATE = re.compile(r"<\|python_tag\|>|\{\"name\": function name, \"parameters\":")
MAX_HEAD_CHARS = 40  # of white space, tag or separator in front of an object
FIRST = re.compile(rf"[{SPACE}]*(?:{re.escape(PYTHON_TAG)}[{SPACE}]*)?(?=\{{)")
LATER = re.compile(rf"[{SPACE}]*{SEPARATOR}[{SPACE}]*(?=\{{)")


class LlamaParser(CallParser):
    _is_text = False  # from here to the end

    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        head, tag = (LATER, SEPARATOR) if self._num_given else (FIRST, PYTHON_TAG)
        self._is_text |= self._num_given > self.num_calls  # one broke
        if not self._is_text and (found := head.match(text, at, at + MAX_HEAD_CHARS)):
            self._begin(found.group())
            return found.end()
        rest = text[at : at + MAX_HEAD_CHARS].lstrip(SPACE)
        if not self._is_text and len(text) - at < MAX_HEAD_CHARS and (tag.startswith(rest) or rest.rstrip(SPACE) == tag):
            self._hold(text[at:])
        else:
            self._is_text = True
            self._say(text[at:], pieces)
        return len(text)

    def _say(self, text: str, pieces: list[AnswerPiece]) -> None:
        self._is_text |= bool(text)
        super()._say(text, pieces)

    def _is_text_at_the_end(self, held: str) -> bool:
        return False  # a separator with nothing behind it


def llama_grammar(calls: list[str], parallel: bool) -> str:
    """Returns the rule `answer` (Lark) for one call or several. `calls`: the rules of their objects."""
    again = f'("{SEPARATOR} " call)*' if parallel else ""
    return f"answer: call {again}\ncall: {' | '.join(calls)}\n"


# -- Mistral, Granite, Phi-4-mini: a tag, and a list of calls behind it
#
#     [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}]
#     [TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time[ARGS]{}       newer models of Mistral
#
# A tag that is followed by neither is text.

MAX_LIST_HEAD = 160  # characters between a tag and the object behind it
LIST = re.compile(rf"[{SPACE}]*+\[[{SPACE}]*+(?=\{{)")
HALF_LIST = re.compile(rf"[{SPACE}]*+(?:\[[{SPACE}]*+)?")
NAMED = re.compile(rf"([a-zA-Z0-9_-]{{1,64}}+)(?:\[CALL_ID\][a-zA-Z0-9]{{1,40}}+)?(?:\[ARGS\])?[{SPACE}]*+(?=\{{)")
HALF_NAMED = re.compile(rf"[a-zA-Z0-9_-]{{1,64}}+(?:\[[A-Z_]{{0,7}}+(?:\][a-zA-Z0-9]{{0,40}}+(?:\[[A-Z]{{0,4}}+\]?)?)?)?[{SPACE}]*+")
NEXT = re.compile(rf"[{SPACE}]*+,[{SPACE}]*+(?=\{{)")
HALF_NEXT = re.compile(rf"[{SPACE}]*+(?:,[{SPACE}]*+)?")
END = re.compile(rf"[{SPACE}]*+\]")


class ListParser(CallParser):
    def __init__(self, names: Collection[str], stream: bool, tags: tuple[str, ...], closing: str = "", named: bool = False) -> None:
        """`closing`: a tag that may follow a list; `named`: whether a name may follow a tag"""
        super().__init__(names, stream)
        self._tags, self._closing_tag, self._named = tags, closing, named
        self._any_tag = re.compile("|".join(map(re.escape, tags)))
        self._in_list = False

    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        if self._in_list:
            self._in_list = self._behind_call
            return self._next(text, at) if self._in_list else at
        if self._behind_call and self._closing_tag and (end := self._closing(text, at, self._closing_tag)) > at:
            return end
        found = self._any_tag.search(text, at)
        if found is not None:
            return self._tagged(text, at, found, pieces)
        end = min(half_tag(text, at, tag) for tag in self._tags)
        self._say(text[at:end], pieces)
        self._hold(text[end:])
        return len(text)

    def _tagged(self, text: str, at: int, tag: re.Match[str], pieces: list[AnswerPiece]) -> int:
        """Begins the call behind a tag, waits for more of its head, or takes the tag for text."""
        start, behind, limit = tag_start(text, at, tag.start()), tag.end(), tag.end() + MAX_LIST_HEAD
        named = NAMED.match(text, behind, limit) if self._named else None
        head = named or LIST.match(text, behind, limit)
        if head is not None:
            self._say(text[at:start], pieces)
            self._in_list = named is None
            self._begin(text[start : head.end()], named[1] if named else None)
            return head.end()
        if len(text) < limit and (HALF_LIST.fullmatch(text, behind) or (self._named and HALF_NAMED.fullmatch(text, behind))):
            self._say(text[at:start], pieces)
            self._hold(text[start:])
            return len(text)
        self._say(text[at:behind], pieces)
        return behind

    def _next(self, text: str, at: int) -> int:
        """Goes on in a list, behind one of its calls."""
        limit = at + MAX_LIST_HEAD
        if found := NEXT.match(text, at, limit):
            self._begin(found.group())
            return found.end()
        if len(text) < limit and HALF_NEXT.fullmatch(text, at):
            self._hold(text[at:])
            return len(text)
        self._in_list = False
        ended = END.match(text, at, limit)
        return at if ended is None else ended.end()

    def _is_text_at_the_end(self, held: str) -> bool:
        head = held.lstrip(SPACE)
        return bool(head) and any(tag.startswith(head) or head.startswith(tag) for tag in self._tags)


def mistral_parser(names: Collection[str], stream: bool) -> CallParser:
    return ListParser(names, stream, ("[TOOL_CALLS]",), named=True)


def granite_parser(names: Collection[str], stream: bool) -> CallParser:
    return ListParser(names, stream, ("<|tool_call|>", "<tool_call>"), "</tool_call>")


def phi_parser(names: Collection[str], stream: bool) -> CallParser:
    return ListParser(names, stream, ("<|tool_call|>", "functools"), "<|/tool_call|>")


def list_grammar(head: str, tail: str = "") -> Callable[[list[str], bool], str]:
    """Returns a function that makes the rule `answer` (Lark) for one call or several, between `head` and `tail`."""

    def grammar(calls: list[str], parallel: bool) -> str:
        again = '(", " call)*' if parallel else ""
        return f'answer: "{head}[" call {again} "]{tail}"\ncall: {" | ".join(calls)}\n'

    return grammar


# -- the families

# as templates write JSON; it also keeps a small model from writing spaces for ever
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PLAIN = {"$defs", "$schema", "definitions", "description", "properties", "required", "title", "type"}  # of a plain list of parameters


@dataclass(frozen=True, slots=True)
class Family:
    parser: Callable[[Collection[str], bool], CallParser]
    spoken_in: Callable[[str], object]  # by a template, found in its text
    grammar: Callable[[list[str], bool], str]
    call: tuple[str, str] = ('{"name": "NAME", "arguments": ', "}")  # what stands around the arguments of a forced call


FAMILIES: Mapping[str, Family] = {
    "hermes": Family(HermesParser, HERMES_TEMPLATE.search, hermes_grammar),
    "llama3_json": Family(LlamaParser, LLAMA_TEMPLATE.search, llama_grammar, ('{"name": "NAME", "parameters": ', "}")),
    "mistral": Family(mistral_parser, re.compile(r"\[TOOL_CALLS\]").search, list_grammar("[TOOL_CALLS]")),
    "phi4_mini_json": Family(phi_parser, re.compile(r"<\|/tool(_call)?\|>").search, list_grammar("<|tool_call|>", "<|/tool_call|>")),
    "granite": Family(granite_parser, re.compile(r"<\|tool_call\|>").search, list_grammar("<|tool_call|>")),
    "qwen3_coder": Family(HermesParser, XML_TEMPLATE.search, hermes_grammar),
    "pythonic": Family(PythonParser, PYTHON_TEMPLATE.search, list_grammar(""), ("NAME(**", ")")),
    "harmony": Family(
        HarmonyParser, re.compile(re.escape(CHANNEL)).search, harmony_grammar,
        (f"{CHANNEL}commentary to=functions.NAME <|constrain|>json{MESSAGE}", CALL),
    ),
}  # fmt: skip
TOOL_CALL_PARSERS = ("auto", *FAMILIES, "none")


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


def tool_call_family(parser: str, template: str | None) -> str:
    """Returns the family that a setting means. `auto` is the first family that the chat template knows, or none."""
    assert parser in TOOL_CALL_PARSERS
    if parser != "auto":
        return parser
    return next((name for name, family in FAMILIES.items() if family.spoken_in(template or "")), "none")


def tool_call_parser(family: str, names: Collection[str], stream: bool, texts: Texts = ()) -> CallParser:
    """Returns the parser of one answer. If no tools are offered, it takes everything for text. `texts`: parameters that are text"""
    if not names or family not in FAMILIES:
        return CallParser()
    return HermesParser(names, stream, texts) if family == "qwen3_coder" else FAMILIES[family].parser(names, stream)


def collected(pieces: Sequence[AnswerPiece]) -> tuple[str, list[ToolCall]]:
    """Returns the text and the calls of a whole answer."""
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    deltas = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    calls = []
    for first in deltas:
        if first.id is not None and first.name is not None:
            arguments = "".join(delta.arguments for delta in deltas if delta.index == first.index)
            calls.append(ToolCall(first.id, first.name, arguments))
    return text, calls


def forced_call(family: str, tools: Sequence[Mapping[str, object]], parallel: bool) -> str:
    """Returns rules (llguidance's Lark) whose `answer` is one call of these checked tools, or with `parallel` at least one."""
    if family not in FAMILIES:
        raise RequestError("tool_choice asks for a call, but the model has no form of them; see --tool-call-parser", "tool_choice")
    rules = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        assert isinstance(function, Mapping)
        head, tail = (json.dumps(part.replace("NAME", str(function["name"]))) for part in FAMILIES[family].call)
        rules.append(f"object_{index}: {head} arguments_{index} {tail}\narguments_{index}: %json {json.dumps(_schema(function))}\n")
    return FAMILIES[family].grammar([f"object_{index}" for index in range(len(tools))], parallel) + "".join(rules)


def _schema(function: Mapping[str, object]) -> dict[str, object]:
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):  # a function of no parameters
        parameters = {"properties": {}}
    properties: Mapping[str, object] | None = parameters.get("properties")
    if properties is not None and parameters.keys() <= PLAIN and set(parameters.get("required", ())) <= set(properties):
        parameters = {**parameters, "additionalProperties": False}  # a small model makes up more and more
    return {**parameters, "type": "object", "x-guidance": FORM}
