"""Gemma's form of tool calls: Python calls whose values are literals, which become JSON. Gemma 3 has no tokens for calls.

    [weather(city="Paris", days=2), time()]        a list, which is the beginning of an answer

    ```tool_code
    weather(city="Paris", days=2)
    ```                                            or a block, anywhere

Values are read token by token, in time that grows with their length, and nothing is evaluated. A parameter is given out when it is
complete. A forced call has its arguments as one object: `weather(**{"city": "Paris"})`.
"""

import re
from collections.abc import Collection

from octavo.text.call_parser import AnswerPiece, CallParser
from octavo.text.call_reader import MAX_SCALAR_CHARS, JsonScanner, NotJson, OneCall, as_written
from octavo.text.tags import SPACE, half_tag, skip_space, tag_start

PYTHON_TEMPLATE = re.compile(r"\[func_name1\(params_name1=|```tool_code")
CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_CODE_POINT = 0x10FFFF

_WORD = re.compile(r"[-+.\w]*+")
_PLAIN = re.compile(r"[^\\'\"]*+")
_KEY = re.compile(r"[^\W\d]\w{0,99}+")
_HALF_HEX = re.compile(r"[0-9a-fA-F]*+")


class PythonReader(OneCall):
    """Reads the arguments of one call, from behind its `name(` to its `)`."""

    def __init__(self, head: str, index: int, names: Collection[str], stream: bool, name: str) -> None:
        super().__init__(head, index, names, stream)
        self.over = name not in names
        self._name = None if self.over else name
        self._next = "first key"  # or key, value, comma, end
        self._key: str | None = None  # None: the value holds all arguments
        self._keys: set[str] = set()
        self._word = ""  # a key, number or constant, what came of it
        self._quote = ""  # of the string we are inside of
        self._escape = ""  # what came of one, from its backslash on
        self._string: list[str] = []
        self._scanner = JsonScanner()
        self._value: list[str] = []  # JSON

    def take(self, text: str, at: int) -> int:
        """Reads on from `at`. Returns the place at which the call is over or the text ends."""
        start = at
        try:
            while at < len(text) and not self.over:
                at = self._step(text, at)
        except NotJson as error:
            self.over, at = True, error.place
        self._keep(text[start:at])
        return at

    def _step(self, text: str, at: int) -> int:
        if self._quote:
            return self._in_string(text, at)
        if self._word or self._next == "value":
            return self._in_value(text, at) if self._next == "value" else self._in_key(text, at)
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] == ")" and self._next != "key":
            self.over = self.stands = True
            if self._next != "end":
                self._arguments.append("}" if self._keys else "{}")
        elif text[at] == "," and self._next == "comma":
            self._next = "key"
        elif self._next in ("key", "first key"):
            return self._in_key(text, at)
        else:
            raise NotJson(at)
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        """Takes a name up to its `=`, or the two stars in front of all arguments."""
        character = text[at]
        whole = self._word + character
        if self._next == "first key" and whole in ("*", "**"):
            self._word = "*" if whole == "*" else ""
            self._next = "first key" if whole == "*" else "value"
        elif character == "=" and (key := self._word.rstrip()) and key != "*" and key not in self._keys:
            self._key, self._word, self._next = key, "", "value"
            self._keys.add(key)
        elif _KEY.fullmatch(whole) or (character in SPACE and self._word not in ("", "*")):
            self._word = whole if character not in SPACE else f"{self._word.rstrip()} "
        else:
            raise NotJson(at)
        return at + 1

    def _in_value(self, text: str, at: int) -> int:
        end = min(at + MAX_SCALAR_CHARS - len(self._word), len(text))
        found = _WORD.match(text, at, end)
        assert found is not None
        self._word += found.group()
        if found.end() == end:
            if len(self._word) == MAX_SCALAR_CHARS:
                raise NotJson(end)
            return end
        at = found.end()
        if self._word:
            self._give(CONSTANTS.get(self._word, self._word) + " ", at)  # the space ends a number
            self._word = ""
            return at
        character = text[at]
        if character in "'\"":
            self._quote = character
        elif character not in SPACE:
            self._give(character, at)
        return at + 1

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            self._in_escape(text[at], at)
            return at + 1
        found = _PLAIN.match(text, at)
        assert found is not None
        self._string.append(found.group())
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escape = "\\"
        elif text[at] == self._quote:
            self._quote, value = "", "".join(self._string)
            self._string.clear()
            self._give(as_written(value), at)
        else:
            self._string.append(text[at])
        return at + 1

    def _in_escape(self, character: str, at: int) -> None:
        self._escape += character
        kind, digits = self._escape[1], self._escape[2:]
        if kind in HEX_DIGITS:
            if not _HALF_HEX.fullmatch(digits) or (len(digits) == HEX_DIGITS[kind] and int(digits, 16) > MAX_CODE_POINT):
                raise NotJson(at)
            if len(digits) < HEX_DIGITS[kind]:
                return
            self._string.append(chr(int(digits, 16)))
        else:
            self._string.append(ESCAPES.get(kind, self._escape))  # Python keeps the backslash of an unknown one
        self._escape = ""

    def _give(self, token: str, at: int) -> None:
        """Adds a token of JSON to the value. Raises NotJson, with `at` for its place, if it cannot stand there."""
        if self._key is None and not self._value and token != "{":
            raise NotJson(at)
        try:
            self._scanner.take(token)
        except NotJson:
            raise NotJson(at) from None
        self._value.append(token.strip() if not token.startswith('"') else token)
        if token in (",", ":"):
            self._value.append(" ")
        if self._scanner.complete:
            self._value_done()

    def _value_done(self) -> None:
        value = "".join(self._value)
        first = len(self._keys) == 1
        self._arguments.append(value if self._key is None else f"{'{' if first else ', '}{as_written(self._key)}: {value}")
        self._next = "end" if self._key is None else "comma"
        self._scanner, self._value = JsonScanner(), []


# -- where calls stand

BLOCK, FENCE = "```tool_code", "```"
MAX_HEAD = 160  # characters in front of the arguments of a call
_NAME = r"([a-zA-Z_][a-zA-Z0-9_.-]{0,63}+)"
_HALF = rf"(?:{_NAME}\(?)?"
FIRST = re.compile(rf"[{SPACE}]*+\[[{SPACE}]*+{_NAME}\(")
HALF_FIRST = re.compile(rf"[{SPACE}]*+(?:\[[{SPACE}]*+{_HALF})?")
IN_BLOCK = re.compile(rf"[{SPACE}]*+(?:\[[{SPACE}]*+)?{_NAME}\(")
HALF_IN_BLOCK = re.compile(rf"[{SPACE}]*+(?:\[[{SPACE}]*+)?{_HALF}")
NEXT = {False: re.compile(rf"[{SPACE}]*+,[{SPACE}]*+{_NAME}\("), True: re.compile(rf"[{SPACE}]*+(?:,[{SPACE}]*+)?{_NAME}\(")}
HALF_NEXT = {False: re.compile(rf"[{SPACE}]*+(?:,[{SPACE}]*+{_HALF})?"), True: re.compile(rf"[{SPACE}]*+(?:,[{SPACE}]*+)?{_HALF}")}
END = {False: re.compile(rf"[{SPACE}]*+\]"), True: re.compile(rf"[{SPACE}]*+(?:\][{SPACE}]*+)?{FENCE}")}
HALF_END = {False: re.compile(rf"[{SPACE}]*+"), True: re.compile(rf"[{SPACE}]*+(?:\][{SPACE}]*+)?`{{0,2}}")}


class PythonParser(CallParser):
    def __init__(self, names: Collection[str] = (), stream: bool = True) -> None:
        super().__init__(names, stream)
        self._is_start = True  # of the answer: a list may begin
        self._in_block: bool | None = None  # or in a list; None: in neither

    def _begin(self, head: str, name: str | None = None) -> None:
        assert name is not None
        self._is_start = False
        self._call = PythonReader(head, self._num_given, self._names, self._stream, name)

    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        if self._in_block is not None and self._behind_call:
            return self._behind(self._in_block, text, at)
        self._in_block = None
        if self._is_start:
            if (end := self._head(FIRST, HALF_FIRST, text, at, at)) > at:
                self._in_block = False if self._call is not None else None
                return end
            self._is_start = False
        place = text.find(BLOCK, at)
        start = half_tag(text, at, BLOCK) if place < 0 else tag_start(text, at, place)
        self._say(text[at:start], pieces)
        if place < 0:
            self._hold(text[start:])
            return len(text)
        behind = place + len(BLOCK)
        end = self._head(IN_BLOCK, HALF_IN_BLOCK, text, start, behind)
        if end > start:
            self._in_block = True if self._call is not None else None
            return end
        self._say(text[start:behind], pieces)
        return behind

    def _head(self, whole: re.Pattern[str], half: re.Pattern[str], text: str, start: int, at: int) -> int:
        """Begins the call whose head is at `at`, or holds text back from `start` on if it may become one. Else returns `start`."""
        limit = at + MAX_HEAD
        if found := whole.match(text, at, limit):
            self._begin(text[start : found.end()], found[1])
            return found.end()
        if len(text) < limit and half.fullmatch(text, at):
            self._hold(text[start:])
            return len(text)
        return start

    def _behind(self, in_block: bool, text: str, at: int) -> int:
        """Goes on behind a complete call: with the next one, or to the end of the list or block."""
        if (end := self._head(NEXT[in_block], HALF_NEXT[in_block], text, at, at)) > at:
            return end
        if ended := END[in_block].match(text, at, at + MAX_HEAD):
            self._in_block = None
            return ended.end()
        if len(text) < at + MAX_HEAD and HALF_END[in_block].fullmatch(text, at):
            self._hold(text[at:])
            return len(text)
        self._in_block = None
        return at

    def _say(self, text: str, pieces: list[AnswerPiece]) -> None:
        self._is_start &= not text
        super()._say(text, pieces)

    def _is_text_at_the_end(self, held: str) -> bool:
        return self._in_block is None and bool(held.strip(SPACE))
