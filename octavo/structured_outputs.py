"""`StructuredOutputsParams`: the form an answer must have, checked for type and meaning at construction.

Exactly one of json (a schema), json_object, regex, choice, grammar and structural_tag is given. Whatever is kept is
plain text, so that it can cross a process and be a key. Its length is bounded before anything else is done with it. Whether a schema,
regex or grammar makes sense is found where it is compiled.
"""

import json as json_format
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from octavo.errors import RequestError
from octavo.vllm_names import FORM_FIELDS, explained, names_explained

PARAM = "structured_outputs"
MAX_CHARS = 200_000  # of a schema, a regex, a grammar, or all choices
MAX_CHOICES = 10_000
MAX_TAGS = 128


@names_explained(FORM_FIELDS)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    json: str | None = None  # a JSON schema: an object or its text; kept as text
    json_object: bool | None = False  # any JSON object
    regex: str | None = None  # the whole answer matches it
    choice: tuple[str, ...] = ()  # the answer is one of these
    grammar: str | None = None  # Lark, as llguidance reads it, or EBNF with a rule `root`
    structural_tag: str | None = None  # {"structures": [{"begin", "schema", "end"}], "triggers": [...]}; kept as text

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if self.json_object is None:
            set_(self, "json_object", False)
        if type(self.json_object) is not bool:
            raise _bad(f"json_object must be true or false, got {type(self.json_object).__name__}")
        if self.json is not None:
            set_(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.structural_tag is not None:
            set_(self, "structural_tag", _tag_text(self.structural_tag))
        set_(self, "choice", () if self.choice is None else _choices(self.choice))
        given = [field.name for field in fields(self) if getattr(self, field.name)]
        if len(given) != 1:
            found = " and ".join(given) if given else "nothing"
            raise _bad(f"needs exactly one of {', '.join(NAMES)}, got {found}")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name))

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.choice)) + sum(len(text or "") for text in (self.json, self.regex, self.grammar, self.structural_tag))


NAMES = tuple(field.name for field in fields(StructuredOutputsParams))


def structured_outputs(value: object) -> StructuredOutputsParams:
    """One of these, also out of a mapping with the names of its fields, as a request's body has it."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise _bad(f"must be an object with one of {', '.join(NAMES)}, got {type(value).__name__}")
    unknown = next((str(name) for name in value if name not in NAMES), None)
    if unknown is not None:
        raise _bad(f"has no field {unknown[:40]!r}{explained(unknown, FORM_FIELDS) or '; there are ' + ', '.join(sorted(NAMES))}")
    given = {str(name): item for name, item in value.items() if item is not None}
    return StructuredOutputsParams(**given)


def _bad(what: str) -> RequestError:
    return RequestError(f"{PARAM} {what}", PARAM)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise _bad(f"{name} must be a text that is not empty")
    _check_length(name, len(value))
    if "\0" in value:
        raise _bad(f"{name} holds a NUL character, which no answer can have")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _bad(f"{name} holds an unpaired surrogate at character {error.start}, so it is not valid Unicode") from None


def _check_length(name: str, chars: int) -> None:
    if chars > MAX_CHARS:
        raise _bad(f"{name} has {chars:,} characters, at most {MAX_CHARS:,} are allowed")


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise _bad("choice must be a list of texts")
    if len(value) > MAX_CHOICES:
        raise _bad(f"choice has {len(value):,} texts, at most {MAX_CHOICES:,} are allowed")
    if not all(isinstance(item, str) and item for item in value):
        raise _bad("choice must be a list of texts that are not empty")
    if value:
        _check_text("choice", "".join(value))
    return tuple(value)


def _schema_text(value: object) -> str:
    return _object_text("json", value, "a JSON schema: an object, or the text of one")


def _tag_text(value: object) -> str:
    text = _object_text("structural_tag", value, "an object with structures and triggers, or the text of one")
    _check_tag(json_format.loads(text))
    return text


def _check_tag(tag: Mapping[str, object]) -> None:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not (isinstance(structures, list) and 0 < len(structures) <= MAX_TAGS and isinstance(triggers, list) and triggers):
        raise _bad(f"structural_tag must have a list of 1 to {MAX_TAGS} structures and a list of triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise _bad("structural_tag: triggers must be texts that are not empty")
    for index, one in enumerate(structures):
        begin, schema, end = (one.get(name) if isinstance(one, Mapping) else None for name in ("begin", "schema", "end"))
        if not (isinstance(begin, str) and isinstance(schema, Mapping) and isinstance(end, str)):
            raise _bad(f"structural_tag: structures[{index}] must have begin and end, which are texts, and schema, which is an object")
        if not begin.startswith(tuple(triggers)):
            raise _bad(f"structural_tag: structures[{index}].begin {begin[:40]!r} starts with none of the triggers")


def _object_text(name: str, value: object, wanted: str) -> str:
    """The text of an object. A text is read and written anew, so that equal objects have equal texts."""
    if isinstance(value, str):
        _check_length(name, len(value))
        return _rewritten(name, value, wanted)
    if isinstance(value, Mapping) and _is_long(value):
        raise _bad(f"{name} has more than {MAX_CHARS:,} characters")
    return _written(name, value, wanted)


@lru_cache(8)  # the prompts of one request bring the same text to the engine, one after another
def _rewritten(name: str, text: str, wanted: str) -> str:
    return _written(name, text, wanted)


def _written(name: str, value: object, wanted: str) -> str:
    try:
        found = json_format.loads(value) if isinstance(value, str) else value
        if not isinstance(found, Mapping):
            raise _bad(f"{name} must be {wanted}")
        text = json_format.dumps(dict(found), allow_nan=False)
    except RecursionError:
        raise _bad(f"{name} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise _bad(f"{name} is not JSON: {str(error)[:100]}") from None
    _check_length(name, len(text))
    return text


def _is_long(value: Mapping[object, object]) -> bool:
    """Whether the text of this JSON would be too long, counted without recursion and no further than need be."""
    chars, waiting = 0, list[Any]([value])
    while waiting and chars <= MAX_CHARS:
        one = waiting.pop()
        chars += 3 * len(one)  # an item has a character at least, and two stand behind it
        if chars <= MAX_CHARS:
            items = [*one, *one.values()] if isinstance(one, Mapping) else one
            chars += sum([len(item) for item in items if type(item) is str])
            waiting += [item for item in items if type(item) in (dict, list, tuple)]
    return chars > MAX_CHARS
