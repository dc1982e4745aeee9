"""What a grammar may hold, checked before anything is compiled: what would take too long, or too much memory, is refused by name.

Compilers of grammars have limits of their own, but some are met after seconds and hundreds of megabytes, and one by a crash.
A check reads a text once, in one pass: no expression in here can go back. The server checks in the process that tries a grammar
out, `LLM` before a request is added; the engine itself does not check again.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from octavo.errors import RequestError
from octavo.structured_outputs import PARAM, StructuredOutputs

MAX_REGEX_CHARS = 10_000
MAX_TEXT_CHARS = 10_000  # of one choice, name or value: where it must follow, 1,000 characters take 0.2 ms at every token
MAX_LARK_CHARS = 50_000  # of a grammar that stands alone; compiling takes 0.2 s for so many
MAX_DEPTH = 60  # of a schema's objects and lists
MAX_VALUES = 10_000  # of all enums of a schema
MAX_PROPERTIES = 500  # of one object; where all may be left out, some masks take 10 ms and 50,000 items of the parser
MAX_COUNT = 1_000_000  # of items, properties or characters, in a schema
MAX_REPEATS = 10_000  # of anything in a regex, repetitions inside it multiplied
MAX_RULES = 1_000  # of a grammar
MAX_GROUPS = 100  # inside each other, of a grammar or regex
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")

# a set that is not closed goes on to the end
_TOKEN = re.compile(
    r"(?P<anchor>[$^]|\\[AbBzZ])"
    r"|(?P<atom>\\[pP]\{[^}]{0,60}\}|\\.|\[\^?+\]?+(?:\\.|\[:\w{1,20}:\]|[^\]\\])*+\]?)"
    r"|(?P<open>\((?:\?[^():]{0,60}:)?)|(?P<close>\))"
    r"|(?P<repeat>(?:[*+?]|\{(?P<least>\d{1,18})(?P<comma>,)?(?P<most>\d{0,18})\})\??)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_RULE = re.compile(r"^[ \t]*+[?!]*+\w[^\n\"/:]*+:", re.MULTILINE)


def need_library() -> None:
    if find_spec("llguidance") is None:
        raise RequestError(f"{PARAM} needs the package llguidance, which is not installed: pip install llguidance", PARAM)


def check_limits(structured: StructuredOutputs) -> None:
    """Raises RequestError for what is refused. How long it may be was checked when it was made."""
    if structured.json is not None:
        _check_schema(json.loads(structured.json))
    elif structured.regex is not None:
        check_regex(structured.regex)
    elif structured.grammar is not None:
        _check_grammar(structured.grammar)
    else:
        _check_texts(structured.choice, "choice")


def _bad(what: str) -> RequestError:
    return RequestError(f"{PARAM}: {what}", PARAM)


def _at_most(number: int, limit: int, name: str, unit: str = "") -> None:
    if number > limit:
        raise _bad(f"{name} {number:,}{unit and ' '}{unit}, at most {limit:,} are allowed")


def _check_texts(texts: Iterable[object], name: str) -> None:
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    _at_most(longest, MAX_TEXT_CHARS, f"{name} has a text of", "characters")


def _check_schema(schema: object) -> None:
    values = depth = 0
    level: list[object] = [schema]
    while level:
        _at_most(depth := depth + 1, MAX_DEPTH, "json is nested to", "levels")
        for one in level:
            if isinstance(one, dict):
                enum = one["enum"] if isinstance(one.get("enum"), list) else []
                values += len(enum)
                _check_texts([*one, *enum, one.get("const")], "json")
                _check_keywords(one)
        _at_most(values, MAX_VALUES, "json has enums of", "values")
        level = [part for one in level for part in _parts(one)]


def _parts(schema: object) -> Iterable[object]:
    if isinstance(schema, dict):
        return schema.values()
    return schema if isinstance(schema, list) else ()


def _check_keywords(schema: dict[str, object]) -> None:
    for name in COUNTS:
        if isinstance(count := schema.get(name), int):
            _at_most(count, MAX_COUNT, f"{name} is")
    if isinstance(properties := schema.get("properties"), dict):
        _at_most(len(properties), MAX_PROPERTIES, "json has an object of", "properties")
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            check_regex(pattern)
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise _bad(f"$ref {reference[:60]!r} points outside the schema; only references inside it (#/...) are read")


@dataclass(slots=True)
class _Group:
    """Of a regex, as far as it was read."""

    heaviest: int = 1  # most repetitions of anything in it, multiplied
    items: int = 0
    weight: int = 1  # that of the newest item
    endless: bool = False  # whether that is repeated without end
    anchor: bool = False  # whether it is one

    def add(self, weight: int = 1, endless: bool = False, anchor: bool = False) -> None:
        self.items += 1
        self.heaviest, self.weight, self.endless, self.anchor = max(self.heaviest, weight), weight, endless, anchor


def check_regex(regex: str) -> None:
    """Refuses a repeated anchor, a repetition without end of nothing but another one, and counts that multiply beyond all use."""
    _at_most(len(regex), MAX_REGEX_CHARS, "regex has", "characters")
    groups = [_Group()]
    for found in _TOKEN.finditer(regex):
        group, kind = groups[-1], found.lastgroup
        if kind == "open":
            groups.append(_Group())
            _at_most(len(groups), MAX_GROUPS, "regex has", "groups inside each other")
        elif kind == "close" and len(groups) > 1:
            inner = groups.pop()
            groups[-1].add(inner.heaviest, endless=inner.endless and inner.items == 1)
        elif kind == "repeat":
            _repeat(group, found)
        else:
            group.add(anchor=kind == "anchor")


def _repeat(group: _Group, found: re.Match[str]) -> None:
    least, comma, most = found.group("least", "comma", "most")
    endless = found.group()[0] in "*+" or bool(comma and not most)
    if group.anchor:
        raise _bad(f"regex repeats an anchor, at character {found.start()}")
    if endless and group.endless:
        raise _bad(f"regex repeats without end what is repeated without end already, at character {found.start()}; once is enough")
    group.weight *= max([1, *(int(number) for number in (least, most) if number)])
    group.heaviest, group.endless = max(group.heaviest, group.weight), endless
    _at_most(group.weight, MAX_REPEATS, "regex repeats something", "times")


def _check_grammar(text: str) -> None:
    """Lark, or several grammars as JSON (see `grammar_text`)."""
    if not text.lstrip().startswith("{"):
        _at_most(len(text), MAX_LARK_CHARS, "grammar has", "characters")
        _check_rules(text)
        return
    try:
        several = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"grammar is not JSON: {str(error)[:100]}") from None
    parts = several.get("grammars")
    for part in parts if isinstance(parts, list) else ():
        schema, lark = (part.get("json_schema"), part.get("lark_grammar")) if isinstance(part, dict) else (None, None)
        if schema is not None:
            _check_schema(schema)
        if isinstance(lark, str):
            _check_rules(lark)


def _check_rules(grammar: str) -> None:
    _at_most(len(_RULE.findall(grammar)), MAX_RULES, "grammar has", "rules")
