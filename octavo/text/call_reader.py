"""Reads one tool call while it arrives: a JSON object with a name and arguments, in any order, and perhaps other keys.

    {"name": "weather", "arguments": {"city": "Par | is"}}        the arguments are the model's own text, as it wrote it

A call is complete once it has its name, which must be one of those offered, and its arguments, which must be an object. Text that
breaks before is no call; it is kept until then. A stream cannot take anything back: there a call is given out when its arguments
begin, and a call that breaks later ends where it broke.
"""

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from octavo.text.tags import SPACE, skip_space

# -- one JSON value, checked while it arrives, in time that grows with its length, however it is cut and however hostile
#
#     {"city": "Par | is", "days": 1 | 2}        nothing is kept but the brackets still open, and the half of a token
#
# No value is made. The scanner finds where the value ends, or where it stops being JSON.

MAX_DEPTH = 64  # deeper values are refused: recursive readers give up at some depth, too
MAX_SCALAR_CHARS = 400

_CLOSING = {"{": "}", "[": "]"}
_CHARACTERS = r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+'
_IN_STRING = re.compile(_CHARACTERS)
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]*+")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")

# Whole members of an array or object, each with its comma: read in one go where there are some.
_SHORT = r"true|false|null|-?(?:0|[1-9][0-9]{0,99}+)(?:\.[0-9]{1,99}+)?+(?:[eE][-+]?[0-9]{1,9}+)?+"
_MEMBER = rf'(?:"{_CHARACTERS}"|{_SHORT}|\[\]|\{{\}})[{SPACE}]*+,[{SPACE}]*+'
_VALUES = re.compile(rf"(?:{_MEMBER})++")
_PAIRS = re.compile(rf'(?:"{_CHARACTERS}"[{SPACE}]*+:[{SPACE}]*+{_MEMBER})++')


class NotJson(Exception):
    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place  # of the character that cannot belong, in the text given last


class JsonScanner:
    def __init__(self) -> None:
        self.complete = False
        self._open: list[str] = []  # brackets due, innermost last
        self._next: Literal["value", "first value", "key", "first key", "colon", "comma"] = "value"
        self._is_key = False
        self._token: Literal["string", "scalar"] | None = None  # the one we are inside of
        self._half = ""  # of an escape; of a scalar all that came

    def take(self, text: str, at: int = 0) -> int:
        """Reads on from `at`. Returns the place at which the value or the text ends. Raises NotJson if the value cannot go on."""
        while at < len(text) and not self.complete:
            if self._token == "string":
                at = self._string(text, at)
            elif self._token == "scalar":
                at = self._scalar(text, at)
            else:
                at = self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if not self._half:
            found = _IN_STRING.match(text, at)
            assert found is not None
            at = found.end()
            if at == len(text):
                return at
            if text[at] == '"':
                self._token = None
                if self._is_key:
                    self._next = "colon"
                else:
                    self._value_done()
                return at + 1
        self._half += text[at]  # an escape cut in two, or a wrong one
        if _ESCAPE.fullmatch(self._half):
            self._half = ""
        elif not _HALF_ESCAPE.fullmatch(self._half):
            raise NotJson(at)
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        found = _IN_SCALAR.match(text, at, at + MAX_SCALAR_CHARS - len(self._half))
        assert found is not None
        end = found.end()
        self._half += text[at:end]
        if end < len(text):
            if not _SCALAR.fullmatch(self._half):
                raise NotJson(end)
            self._token, self._half = None, ""
            self._value_done()
        return end

    def _structure(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        due = self._next
        if due != "comma" and (end := self._members(text, at)) > at:
            return end
        character = text[at]
        if due in ("comma", "first value", "first key") and self._open and character == self._open[-1]:
            self._open.pop()
            self._value_done()
        elif due == "comma" and character == ",":
            self._next = "key" if self._open[-1] == "}" else "value"
        elif due == "colon" and character == ":":
            self._next = "value"
        elif due in ("key", "first key") and character == '"':
            self._token, self._is_key = "string", True
        elif due in ("value", "first value"):
            return self._value(character, at)
        else:
            raise NotJson(at)
        return at + 1

    def _members(self, text: str, at: int) -> int:
        """Returns the place behind the members that the text holds as a whole, if members may stand here, or else `at`."""
        pairs, due = self._open[-1:] == ["}"], self._next
        if not self._open or due == "colon" or (pairs and due == "value"):
            return at
        found = (_PAIRS if pairs else _VALUES).match(text, at)
        if found is None:
            return at
        self._next = "key" if pairs else "value"
        return found.end()

    def _value(self, character: str, at: int) -> int:
        if character in _CLOSING:
            if len(self._open) == MAX_DEPTH:
                raise NotJson(at)
            self._open.append(_CLOSING[character])
            self._next = "first key" if character == "{" else "first value"
            return at + 1
        if character == '"':
            self._token, self._is_key = "string", False
            return at + 1
        if character not in "-0123456789tfn":
            raise NotJson(at)
        self._token = "scalar"
        return at

    def _value_done(self) -> None:
        self._next = "comma"
        self.complete = not self._open


# -- one call

MAX_WORD_CHARS = 400  # of a key or a name, as it is written: 64 characters, each escaped

Role = Literal["key", "name", "arguments", "other"]
ROLES: dict[str, Role] = {"name": "name", "arguments": "arguments", "parameters": "arguments"}


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The updates of one call. The first has its id and name, the others have pieces of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class OneCall:
    """What the readers of all forms share: a name and arguments, and what of them is given out."""

    def __init__(self, head: str, index: int, names: Collection[str], stream: bool) -> None:
        """`head`: the text in front of the call, if it belongs to it, such as a tag"""
        self.over = False  # it ended, or broke: there is nothing more to read
        self.given = False  # its first delta is out
        self.stands = False  # it is complete
        self._index, self._names, self._stream = index, names, stream
        self._text = [head]
        self._name: str | None = None
        self._arguments: list[str] = []  # not given out yet

    @property
    def text(self) -> str:
        """The text of the call so far. It is kept only until something is given out."""
        return "".join(self._text)

    def new_deltas(self) -> list[ToolCallDelta]:
        if self._name is None or not self._arguments or not (self._stream or self.stands):
            return []
        deltas = [] if self.given else [ToolCallDelta(self._index, "", f"call_{secrets.token_hex(12)}", self._name)]
        deltas.append(ToolCallDelta(self._index, "".join(self._arguments)))
        self.given = True
        self._arguments.clear()
        self._text.clear()
        return deltas

    def _keep(self, text: str) -> None:
        if not self.given:
            self._text.append(text)


def as_written(value: object) -> str:
    """Returns a value as JSON. Characters stand for themselves, unless one is half of a pair: no text may hold that."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


class CallReader(OneCall):
    def __init__(self, head: str, index: int, names: Collection[str], stream: bool, name: str | None = None) -> None:
        """`name`: of the tool, where the object holds its arguments alone"""
        super().__init__(head, index, names, stream)
        self.over = name is not None and name not in names
        self._next: Literal["object", "first key", "key", "colon", "value", "comma"] = "object"
        self._scanner: JsonScanner | None = None  # of the key or value we are inside of
        self._role: Role = "key"  # of that one, or of the value to come
        self._seen: set[Role] = set()
        self._word = ""  # of a key or a name, what came of it
        self._name = None if self.over else name
        self._has_arguments = False
        self._is_named = name is not None
        if self._is_named:
            self._next, self._role = "value", "arguments"

    def take(self, text: str, at: int) -> int:
        """Reads on from `at`. Returns the place at which the call is over or the text ends."""
        start = at
        while at < len(text) and not self.over:
            at = self._structure(text, at) if self._scanner is None else self._value(self._scanner, text, at)
        self._keep(text[start:at])
        return at

    def _structure(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        character, due = text[at], self._next
        if due in ("comma", "first key") and character == "}":
            self.over = True
        elif due == "object" and character == "{":
            self._next = "first key"
        elif due == "comma" and character == ",":
            self._next = "key"
        elif due == "colon" and character == ":":
            self._next = "value"
        elif (due in ("key", "first key") and character == '"') or (due == "value" and (self._role != "arguments" or character == "{")):
            self._role = self._role if due == "value" else "key"
            self._scanner, self._word = JsonScanner(), ""
            return at
        else:
            self.over = True
            return at
        return at + 1

    def _value(self, scanner: JsonScanner, text: str, at: int) -> int:
        if self._role not in ("key", "name"):
            end = self._scan(scanner, text, at)
            if self._role == "arguments":
                self._arguments.append(text[at:end])
        else:
            part = text[at : at + MAX_WORD_CHARS - len(self._word)]
            end = at + self._scan(scanner, part, 0)
            self._word += text[at:end]
            self.over |= len(self._word) == MAX_WORD_CHARS
        if scanner.complete and not self.over:
            self._scanner = None
            self._value_done()
        return end

    def _scan(self, scanner: JsonScanner, text: str, at: int) -> int:
        try:
            return scanner.take(text, at)
        except NotJson as error:
            self.over = True
            return error.place

    def _value_done(self) -> None:
        self._next = "comma"
        match self._role:
            case "key":
                self._next = "colon"
                self._role = ROLES.get(json.loads(self._word), "other")
                self.over = self._role != "other" and self._role in self._seen
                self._seen.add(self._role)
            case "name":
                name = json.loads(self._word)
                self.over = not isinstance(name, str) or name not in self._names
                self._name = None if self.over else name
            case "arguments":
                self._has_arguments = True
                self.over = self._is_named
        self.stands = self._name is not None and self._has_arguments
