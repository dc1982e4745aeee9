"""Tool calls: parsers for the forms in which models write them, and a grammar that forces a call.

    family = tool_call_family("auto", template)                     --tool-call-parser
    parser = tool_call_parser(family, names, stream=True)           push(delta) -> text and ToolCallDeltas, then flush()
    grammar = forced_call(family, tools, parallel=True)             for tool_choice "required" or a named tool

A family of models says where a call may begin; from there a `CallReader` reads it. Text that turns out to be no call is given
out as text, every character of it. Each character is read a fixed number of times at most, so the cost grows with the text.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import RequestError
from octavo.text.call_reader import CallReader, ToolCallDelta
from octavo.text.tags import MAX_SPACES, SPACE, half_tag, tag_start

AnswerPiece = str | ToolCallDelta


class CallParser:
    """What all families share. Used by itself, it takes everything for text."""

    def __init__(self, names: Collection[str] = (), stream: bool = True) -> None:
        """`names`: of the tools offered. Without `stream`, a call is given out whole, and only if it is complete."""
        self.num_calls = 0  # complete ones
        self._names, self._stream = names, stream
        self._num_given = 0
        self._call: CallReader | None = None
        self._held = ""  # the tail of the text that may become something else
        self._behind_call = False  # nothing came since a complete call

    def push(self, text: str) -> list[AnswerPiece]:
        """Takes the next text. Returns what is now certain, in order."""
        text, self._held = self._held + text, ""
        pieces: list[AnswerPiece] = []
        at = 0
        while at < len(text):
            at = self._outside(text, at, pieces) if self._call is None else self._inside(self._call, text, at, pieces)
        return pieces

    def flush(self) -> list[AnswerPiece]:
        """Ends the answer. Returns an incomplete call and what was held back as text, without what only follows a call."""
        pieces: list[AnswerPiece] = []
        if self._call is not None:
            self._end(self._call, pieces)
        if not self._behind_call or self._is_text_at_the_end(self._held):
            self._say(self._held, pieces)
        self._held = ""
        return pieces

    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        """Takes text up to where a call may begin, and begins it there. Holds back what may be the head of one. Returns the new place."""
        self._say(text[at:], pieces)
        return len(text)

    def _is_text_at_the_end(self, held: str) -> bool:
        """Whether what is held back behind a call is text, if nothing follows."""
        return True

    def _begin(self, head: str) -> None:
        self._call = CallReader(head, self._num_given, self._names, self._stream)

    def _inside(self, call: CallReader, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        at = call.take(text, at)
        pieces += call.news()
        if call.over:
            self._end(call, pieces)
        return at

    def _end(self, call: CallReader, pieces: list[AnswerPiece]) -> None:
        self._call = None
        self._num_given += call.given
        self.num_calls += call.stands
        if call.given:
            self._behind_call = call.stands
        else:
            self._say(call.text, pieces)

    def _hold(self, text: str) -> None:
        self._held = text

    def _say(self, text: str, pieces: list[AnswerPiece]) -> None:
        if text:
            self._behind_call = False
            pieces.append(text)


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
    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        if self._behind_call and (end := self._closing(text, at)) > at:
            return end
        place = text.find(OPEN, at)
        end = half_tag(text, at, OPEN) if place < 0 else tag_start(text, at, place)
        self._say(text[at:end], pieces)
        if place < 0:
            self._hold(text[end:])
            return len(text)
        self._begin(text[end : place + len(OPEN)])
        return place + len(OPEN)

    def _closing(self, text: str, at: int) -> int:
        """Returns where the closing tag behind a call ends, the end of the text if the rest may be the head of one, or else `at`."""
        rest = text[at : at + MAX_SPACES + len(CLOSE)]
        tag = rest.lstrip(SPACE)
        spaces = len(rest) - len(tag)
        if spaces > MAX_SPACES:
            return at
        if tag.startswith(CLOSE):
            return at + spaces + len(CLOSE)
        if CLOSE.startswith(tag):
            self._hold(rest)
            return len(text)
        return at

    def _is_text_at_the_end(self, held: str) -> bool:
        return OPEN.startswith(held.lstrip(SPACE)) and bool(held.strip(SPACE))


def _hermes_grammar(calls: list[str], parallel: bool) -> str:
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


def _llama_grammar(calls: list[str], parallel: bool) -> str:
    """Returns the rule `answer` (Lark) for one call or several. `calls`: the rules of their objects."""
    again = f'("{SEPARATOR} " call)*' if parallel else ""
    return f"answer: call {again}\ncall: {' | '.join(calls)}\n"


# -- all families

# as templates write JSON; it also keeps a small model from writing spaces for ever
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Family:
    parser: type[CallParser]
    spoken_in: Callable[[str], object]  # by a template, found in its text
    arguments: str  # what a call names its arguments
    grammar: Callable[[list[str], bool], str]


FAMILIES: Mapping[str, Family] = {
    "hermes": Family(HermesParser, HERMES_TEMPLATE.search, "arguments", _hermes_grammar),
    "llama3_json": Family(LlamaParser, LLAMA_TEMPLATE.search, "parameters", _llama_grammar),
}
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


def tool_call_parser(family: str, names: Collection[str], stream: bool) -> CallParser:
    """Returns the parser of one answer. If no tools are offered, it takes everything for text."""
    return FAMILIES[family].parser(names, stream) if names and family in FAMILIES else CallParser()


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
        head = json.dumps(f'{{"name": "{function["name"]}", "{FAMILIES[family].arguments}": ')
        rules.append(f'object_{index}: {head} arguments_{index} "}}"\narguments_{index}: %json {json.dumps(_schema(function))}\n')
    return FAMILIES[family].grammar([f"object_{index}" for index in range(len(tools))], parallel) + "".join(rules)


def _schema(function: Mapping[str, object]) -> dict[str, object]:
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):  # a function of no parameters
        parameters = {"properties": {}, "additionalProperties": False}
    return {**parameters, "type": "object", "x-guidance": FORM}
