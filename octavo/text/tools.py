"""Checks the tools of a request: each has a name, a description and a JSON schema.

A schema goes into the prompt, and into a grammar if a call is forced. Its size, its depth and the types of its keywords are
checked here, so that an error can name the place:
`tools[2].function.parameters.properties.city.type`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.errors import RequestError

MAX_TOOLS = 128
MAX_DEPTH = 32  # of a schema
MAX_UNITS = 100_000  # characters and items of all tools
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
SCHEMA = ("additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then")
SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["auto", "none", "required"]
    name: str | None = None  # of the one tool that is required

    def offered(self, tools: list[dict[str, object]]) -> list[dict[str, object]]:
        """Returns the tools that an answer may call."""
        if self.mode == "none":
            return []
        return [tool for tool in tools if self.name is None or tool_name(tool) == self.name]


def tool_name(tool: Mapping[str, object]) -> str:
    function = tool["function"]
    assert isinstance(function, Mapping)
    return str(function["name"])


def text_parameters(tools: Sequence[Mapping[str, object]]) -> frozenset[tuple[str, str]]:
    """Returns the parameters of checked tools that are text, each with the name of its tool."""
    found = set()
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, Mapping)
        properties = (function.get("parameters") or {}).get("properties") or {}
        texts = (key for key, schema in properties.items() if isinstance(schema, Mapping) and schema.get("type") == "string")
        found |= {(tool_name(tool), key) for key in texts}
    return frozenset(found)


def check_tools(tools: object) -> list[dict[str, object]]:
    """Returns the tools as a template wants them. A RequestError names the place at fault."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError(f"tools must be a list, not {type(tools).__name__}", "tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools):,} entries, at most {MAX_TOOLS} are taken", "tools")
    if _is_large(tools):
        raise RequestError(f"tools has more than {MAX_UNITS:,} characters and items", "tools")
    checked: list[dict[str, object]] = []
    names = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = _function(tool, where)
        name = str(function["name"])
        if name in names:
            raise RequestError(f"{where}.function.name is {name!r}, and so is an earlier one", f"{where}.function.name")
        names.add(name)
        checked.append({"type": "function", "function": function})
    return checked


def check_tool_choice(choice: object, tools: list[dict[str, object]]) -> ToolChoice:
    """Returns the choice that was asked for, of these checked tools. The default is auto if there are tools."""
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if choice in ("none", "auto"):
        return ToolChoice("auto" if choice == "auto" and tools else "none")
    if not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice == "required":
        return ToolChoice("required")
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        form = '{"type": "function", "function": {"name": ...}}'
        raise RequestError(f"tool_choice must be auto, none, required or {form}", "tool_choice")
    if name not in map(tool_name, tools):
        raise RequestError(f"tool_choice names {name[:64]!r}, which is not among the tools", "tool_choice")
    return ToolChoice("required", name)


def _function(tool: object, where: str) -> dict[str, object]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function := tool.get("function"), Mapping):
        raise RequestError(f'{where} must be {{"type": "function", "function": {{...}}}}', where)
    where += ".function"
    name, description, parameters = function.get("name"), function.get("description"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{where}.name must be 1 to 64 letters, digits, _ or -", f"{where}.name")
    if not isinstance(description, str | None):
        raise RequestError(f"{where}.description must be text, not {type(description).__name__}", f"{where}.description")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{where}.strict must be true or false", f"{where}.strict")
    if parameters is not None:
        where += ".parameters"
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise RequestError(f'{where} must be a JSON schema of "type": "object"', where)
        _check_schema(parameters, where)
    return {key: value for key, value in function.items() if value is not None}


def _check_schema(schema: object, where: str) -> None:
    """Checks a schema without recursion, since it may be as deep as a request's JSON."""
    waiting = [(schema, where, 1)]
    while waiting:
        schema, where, depth = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, Mapping):
            raise RequestError(f"{where} must be a JSON schema, not {type(schema).__name__}", where)
        if depth > MAX_DEPTH:
            raise RequestError(f"the schema is deeper than {MAX_DEPTH} levels", where.partition(".parameters")[0] + ".parameters")
        for keyword, value in schema.items():
            _check_keyword(keyword, value, f"{where}.{keyword}")
        waiting += [(inner, f"{where}.{place}", depth + 1) for inner, place in _inner(schema)]


def _check_keyword(keyword: object, value: object, where: str) -> None:
    match keyword:
        case "type":
            types = value if isinstance(value, list) else [value]
            if not types or any(not isinstance(name, str) or name not in TYPES for name in types):
                raise RequestError(f"{where} must be one or more of {', '.join(TYPES)}", where)
        case "pattern":
            _check_pattern(value, where)
        case "patternProperties" if isinstance(value, Mapping):
            for pattern in value:
                _check_pattern(pattern, where)
        case "enum" if not isinstance(value, list) or not value:
            raise RequestError(f"{where} must be a list of at least one value", where)
        case "required" if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise RequestError(f"{where} must be a list of names", where)
        case "$ref" if not isinstance(value, str) or not value.startswith("#"):
            raise RequestError(f"{where} must point into the schema itself (#/...): nothing is fetched", where)
        case _ if keyword in COUNTS and (type(value) is not int or value < 0):
            raise RequestError(f"{where} must be a whole number of 0 or more", where)
        case _ if keyword in NAMED_SCHEMAS and not isinstance(value, Mapping):
            raise RequestError(f"{where} must be an object of schemas, not {type(value).__name__}", where)
        case _ if keyword in SCHEMAS and (not isinstance(value, list) or not value):
            raise RequestError(f"{where} must be a list of at least one schema", where)


def _inner(schema: Mapping[object, object]) -> Iterator[tuple[object, str]]:
    """Gives the schemas inside of one, and their places. The name of a property is no keyword."""
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMAS and isinstance(value, Mapping):
            yield from ((inner, f"{keyword}.{name}") for name, inner in value.items())
        elif (keyword in SCHEMAS or keyword == "items") and isinstance(value, list):
            yield from ((inner, f"{keyword}[{place}]") for place, inner in enumerate(value))
        elif keyword in SCHEMA or keyword == "items":
            yield value, str(keyword)


def _check_pattern(pattern: object, where: str) -> None:
    if not isinstance(pattern, str):
        raise RequestError(f"{where} must be a regular expression, not {type(pattern).__name__}", where)
    if wrong := pattern_error(pattern):
        raise RequestError(f"{where} is no regular expression: {wrong}", where)


def _is_large(value: object) -> bool:
    """Whether the tools have more than MAX_UNITS characters and items, counted without recursion and no further than needed."""
    units, waiting = 0, [value]
    while waiting and units <= MAX_UNITS:
        item = waiting.pop()
        units += len(item) if isinstance(item, str | Mapping | list) else 1
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            waiting += item
    return units > MAX_UNITS


# -- regular expressions of a schema, checked in one pass without compiling them
#
# A caller could make compiling take long (large ranges, counts of counts), and every engine has a language of its own. The check
# finds what none of them accepts: groups and classes left open, repetition of nothing, a backslash at the end.

_TOKEN = re.compile(
    r"(?P<atoms>(?:\\[\s\S]|\[\^?+\]?+(?:\\[\s\S]|[^\]\\])*+\]|[^\\\[()|^$*+?{])++)"
    r"|(?P<open>\((?:\?(?:[:=!]|<[=!]|P?<[A-Za-z_]\w*>))?+)(?!\?)"
    r"|(?P<close>\))"
    r"|(?P<repeat>(?:[*+?]|\{(?P<least>\d{1,9})(?:,(?P<most>\d{0,9}))?\})[?+]?)"
    r"|(?P<gap>[|^$])"
    r"|(?P<brace>\{)"
)


def pattern_error(pattern: str) -> str | None:
    """Returns what is wrong with a pattern, and where, or None."""
    at, groups, repeatable = 0, 0, False
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or (token["close"] and not groups) or (token["repeat"] and not repeatable):
            return f"unexpected {pattern[at]!r} at character {at}"
        if token["most"] and int(token["most"]) < int(token["least"]):
            return f"{token['repeat']} at character {at} is at most less than at least"
        groups += bool(token["open"]) - bool(token["close"])
        repeatable = token.lastgroup in ("atoms", "close", "brace")
        at = token.end()
    return "a group is not closed" if groups else None
