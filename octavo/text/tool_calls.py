"""Tool calls by family: which one a model's template speaks, its parser, and a grammar that forces a call in its form.

    family = tool_call_family("auto", template)                     --tool-call-parser
    parser = tool_call_parser(family, names, stream=True)           push(delta) -> text and ToolCallDeltas, then flush()
    grammar = forced_call(family, tools, parallel=True)             for tool_choice "required" or a named tool
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import RequestError
from octavo.text import tool_calls_hermes as hermes
from octavo.text import tool_calls_llama as llama
from octavo.text.call_parser import AnswerPiece, CallParser
from octavo.text.call_reader import ToolCallDelta

# as templates write JSON; it also keeps a small model from writing spaces for ever
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Family:
    parser: type[CallParser]
    spoken_in: Callable[[str], object]  # by a template, found in its text
    arguments: str  # what a call names its arguments
    grammar: Callable[[list[str], bool], str]


FAMILIES: Mapping[str, Family] = {
    "hermes": Family(hermes.HermesParser, hermes.IN_TEMPLATE.search, "arguments", hermes.grammar),
    "llama3_json": Family(llama.LlamaParser, llama.IN_TEMPLATE.search, "parameters", llama.grammar),
}
TOOL_CALL_PARSERS = ("auto", *FAMILIES, "none")


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


def tool_call_family(parser: str, template: str | None) -> str:
    """The family a setting means: auto is the first that the chat template speaks, or none."""
    assert parser in TOOL_CALL_PARSERS
    if parser != "auto":
        return parser
    return next((name for name, family in FAMILIES.items() if family.spoken_in(template or "")), "none")


def tool_call_parser(family: str, names: Collection[str], stream: bool) -> CallParser:
    """One for each answer. Where no tools are offered, everything is text."""
    return FAMILIES[family].parser(names, stream) if names and family in FAMILIES else CallParser()


def collected(pieces: Sequence[AnswerPiece]) -> tuple[str, list[ToolCall]]:
    """A whole answer: its text, and its calls."""
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    deltas = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    calls = []
    for first in deltas:
        if first.id is not None and first.name is not None:
            arguments = "".join(delta.arguments for delta in deltas if delta.index == first.index)
            calls.append(ToolCall(first.id, first.name, arguments))
    return text, calls


def forced_call(family: str, tools: Sequence[Mapping[str, object]], parallel: bool) -> str:
    """Rules (llguidance's Lark) whose `answer` is one call, or at least one, of these checked tools, and nothing else."""
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
