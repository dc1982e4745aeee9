"""Checks one JSON value while it arrives, in time that grows with its length, however it is cut and however hostile.

    {"city": "Par | is", "days": 1 | 2}        nothing is kept but the brackets still open, and the half of a token

It makes no values: it says where the value ends, or where it stops being JSON.
"""

import re
from typing import Literal

from octavo.text.tags import SPACE, skip_space

MAX_DEPTH = 64  # deeper is taken for not JSON: recursive readers of it, everyone's, give up somewhere
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
        """Read on from `at` to the end of the value, or of the text; NotJson where it cannot go on."""
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
        """Behind the members that are here as a whole, where members are due."""
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
