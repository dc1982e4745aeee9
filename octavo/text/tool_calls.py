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
from octavo.text.call_forms import (
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
    HermesParser,
    LlamaParser,
    granite_parser,
    hermes_grammar,
    list_grammar,
    llama_grammar,
    mistral_parser,
    phi_parser,
)
from octavo.text.call_parser import AnswerPiece, CallParser
from octavo.text.call_reader import ToolCallDelta
from octavo.text.harmony import CALL, CHANNEL, MESSAGE, HarmonyParser, harmony_grammar
from octavo.text.python_calls import PYTHON_TEMPLATE, PythonParser
from octavo.text.xml_calls import XML_TEMPLATE, Texts

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
