"""Turns what a request asks for into one grammar text, which is compiled and kept by this text. Also checks its limits.

    json, json_object   {"grammars": [{"json_schema": {...}}]}
    regex, choice       a Lark grammar of one terminal: as a rule, each choice would be an item of the parser's rows
    grammar             itself; EBNF (`root ::= ...`) becomes Lark
    structural_tag      a Lark grammar: any text, in which a trigger begins a tag around JSON
    several             {"grammars": [...]}, the first of them a Lark grammar that names the others

Whitespace between parts of JSON is bounded, because a model that begins to write spaces may not stop before its context ends.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from octavo.errors import RequestError
from octavo.structured_outputs import PARAM, StructuredOutputsParams

# one space, or a new line and its indentation
WHITESPACE = r" ?|\n[ \t]{0,40}"

_ESCAPE = re.compile(r"\\.|[/\n\r]", re.DOTALL)
# a set that is not closed goes on to the end: nothing is read twice
_PIECE = re.compile(rf"(?P<set>\[\^?+\]?+(?:\\.|[^\]\\])*+\]?)|{_ESCAPE.pattern}", re.DOTALL)
_INSIDE = {"/": r"\/", "\n": r"\n", "\r": r"\r", r"\d": "0-9"}
_EBNF = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)  # a rule: no Lark grammar has such a line
_OUTSIDE = _INSIDE | {r"\d": "[0-9]"}


def grammar_text(structured: StructuredOutputsParams) -> str:
    if structured.json is not None:
        return _of_schema(json.loads(structured.json))
    if structured.json_object:
        return _of_schema({"type": "object"})
    if structured.regex is not None:
        return f"start: /{_in_slashes(structured.regex)}/"
    if structured.choice:
        return "start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, dict.fromkeys(structured.choice)))
    if structured.structural_tag is not None:
        return _of_tags(json.loads(structured.structural_tag))
    assert structured.grammar is not None
    if _EBNF.search(structured.grammar):
        from octavo.grammar.guidance import as_lark  # only a request that asks for a grammar loads llguidance

        return as_lark(structured.grammar)
    return structured.grammar


def _of_tags(tag: Mapping[str, list[Any]]) -> str:
    lines = ["TEXT: /(.|\\n)*/"]
    for index, one in enumerate(tag["structures"]):
        trigger = next(trigger for trigger in tag["triggers"] if one["begin"].startswith(trigger))
        rest = [_quoted(text) if text else "" for text in (one["begin"].removeprefix(trigger), one["end"])]
        lines.append(f"begin_{index}[lazy]: TEXT {_quoted(trigger)}")
        lines.append(f"tag_{index}: begin_{index} {rest[0]} @schema_{index} {rest[1]}")
    lines.append(f"start: ({' | '.join(f'tag_{index}' for index in range(len(tag['structures'])))})* last\nlast: TEXT")
    schemas = {f"schema_{index}": StructuredOutputsParams(json=one["schema"]) for index, one in enumerate(tag["structures"])}
    return joined_grammars("\n".join(lines), schemas)


def joined_grammars(frame: str, parts: Mapping[str, StructuredOutputsParams]) -> str:
    """Returns one text for several grammars: a Lark grammar that names the others, as in `start: @form`."""
    grammars = [{"lark_grammar": frame}, *(grammar for name, one in parts.items() for grammar in _named(name, one))]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _named(name: str, structured: StructuredOutputsParams) -> list[dict[str, object]]:
    text = grammar_text(structured)
    if structured.kind in ("json", "json_object", "structural_tag"):
        first, *others = json.loads(text)["grammars"]
        return [{"name": name, **first}, *others]
    return [{"name": name, "lark_grammar": text}]


def _of_schema(schema: dict[str, object]) -> str:
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}}]})


def _quoted(text: str) -> str:
    """Returns the text as a Lark string, with control characters escaped."""
    letters = json.dumps(text, ensure_ascii=False)
    return "".join(letter if letter.isprintable() or ord(letter) > 0xFFFF else f"\\u{ord(letter):04x}" for letter in letters)


def _in_slashes(regex: str) -> str:
    r"""Returns the regex for Lark, with slashes and line breaks escaped. `\d` is 0 to 9, as in JSON: small models write other digits."""
    return _PIECE.sub(_written, regex)


def _written(found: re.Match[str]) -> str:
    if found["set"]:
        return _ESCAPE.sub(lambda inner: _INSIDE.get(inner[0], inner[0]), found[0])
    return _OUTSIDE.get(found[0], found[0])


# -- limits, checked before anything is compiled: a grammar that would take too long or too much memory is refused by name
#
# The compiler has limits of its own, but it reaches some of them after seconds and hundreds of megabytes, and one by a crash. A
# check reads a text once: no expression here can backtrack. The server checks in the process that tries a grammar out, and `LLM`
# checks before a request is added. The engine does not check again.

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


def check_limits(structured: StructuredOutputsParams) -> None:
    """Raises RequestError if a limit is exceeded. The total length was checked when the object was made."""
    if structured.json is not None:
        _check_schema(json.loads(structured.json))
    elif structured.regex is not None:
        check_regex(structured.regex)
    elif structured.grammar is not None:
        _check_grammar(structured.grammar)
    elif structured.structural_tag is not None:
        for one in json.loads(structured.structural_tag)["structures"]:
            _check_texts((one["begin"], one["end"]), "structural_tag")
            _check_schema(one["schema"])
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
    """One group of a regex, as far as it has been read."""

    heaviest: int = 1  # most repetitions of anything in it, multiplied
    items: int = 0
    weight: int = 1  # that of the newest item
    endless: bool = False  # whether that is repeated without end
    anchor: bool = False  # whether it is one

    def add(self, weight: int = 1, endless: bool = False, anchor: bool = False) -> None:
        self.items += 1
        self.heaviest, self.weight, self.endless, self.anchor = max(self.heaviest, weight), weight, endless, anchor


def check_regex(regex: str) -> None:
    """Refuses a repeated anchor, an endless repetition of an endless repetition, and counts whose product is too large."""
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
    """Checks a Lark grammar, or several grammars as JSON (see `joined_grammars`)."""
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
