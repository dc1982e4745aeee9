"""From what a request asks for to one grammar text, which is what is compiled, and the key by which it is kept.

    json, json_object   {"grammars": [{"json_schema": {...}}]}
    regex, choice       a Lark grammar of one terminal: as a rule, each choice would be an item of the parser's rows
    grammar             itself
    several             {"grammars": [...]}, the first of them a Lark grammar that names the others

Whitespace between parts of JSON is bounded: a model that falls into writing spaces could do so to the end of its context.
"""

import json
import re
from collections.abc import Mapping

from octavo.structured_outputs import StructuredOutputs

# one space, or a new line and its indentation
WHITESPACE = r" ?|\n[ \t]{0,40}"

_ESCAPE = re.compile(r"\\.|[/\n\r]", re.DOTALL)
# a set that is not closed goes on to the end: nothing is read twice
_PIECE = re.compile(rf"(?P<set>\[\^?+\]?+(?:\\.|[^\]\\])*+\]?)|{_ESCAPE.pattern}", re.DOTALL)
_INSIDE = {"/": r"\/", "\n": r"\n", "\r": r"\r", r"\d": "0-9"}
_OUTSIDE = _INSIDE | {r"\d": "[0-9]"}


def grammar_text(structured: StructuredOutputs) -> str:
    if structured.json is not None:
        return _of_schema(json.loads(structured.json))
    if structured.json_object:
        return _of_schema({"type": "object"})
    if structured.regex is not None:
        return f"start: /{_in_slashes(structured.regex)}/"
    if structured.choice:
        return "start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, dict.fromkeys(structured.choice)))
    assert structured.grammar is not None
    return structured.grammar


def joined_grammars(frame: str, parts: Mapping[str, StructuredOutputs]) -> str:
    """One text of several grammars: a Lark grammar that names the others, as in `start: @form`."""
    grammars = [{"lark_grammar": frame}, *(_part(name, one) for name, one in parts.items())]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _part(name: str, structured: StructuredOutputs) -> dict[str, object]:
    text = grammar_text(structured)
    if structured.kind in ("json", "json_object"):
        return {"name": name, **json.loads(text)["grammars"][0]}
    return {"name": name, "lark_grammar": text}


def _of_schema(schema: dict[str, object]) -> str:
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}}]})


def _quoted(text: str) -> str:
    """As Lark writes it: no control character stands for itself."""
    letters = json.dumps(text, ensure_ascii=False)
    return "".join(letter if letter.isprintable() or ord(letter) > 0xFFFF else f"\\u{ord(letter):04x}" for letter in letters)


def _in_slashes(regex: str) -> str:
    r"""As Lark writes it: slashes and line breaks are escaped. `\d` is 0 to 9, as in JSON: a small model would find stranger digits."""
    return _PIECE.sub(_written, regex)


def _written(found: re.Match[str]) -> str:
    if found["set"]:
        return _ESCAPE.sub(lambda inner: _INSIDE.get(inner[0], inner[0]), found[0])
    return _OUTSIDE.get(found[0], found[0])
