"""One tool call, read while it arrives: a JSON object with a name and arguments, in whatever order, and what else it has.

    {"name": "weather", "arguments": {"city": "Par | is"}}        the arguments are the model's own text, never made anew

A call stands as soon as its name, which has to be one of those offered, and its arguments, an object, are complete. What
breaks before is no call, and its text is kept until then. A stream cannot take back: there a call is given out when its
arguments begin, and one that breaks later ends where it broke.
"""

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from octavo.text.json_scanner import JsonScanner, NotJson
from octavo.text.tags import skip_space

MAX_WORD_CHARS = 400  # of a key or a name, as it is written: 64 characters, each escaped

Role = Literal["key", "name", "arguments", "other"]
ROLES: dict[str, Role] = {"name": "name", "arguments": "arguments", "parameters": "arguments"}


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of one call: id and name once, with the first, then pieces of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class CallReader:
    def __init__(self, head: str, index: int, names: Collection[str], stream: bool) -> None:
        """`head`: the text in front of the object that belongs to the call."""
        self.over = False  # it ended, or broke: there is nothing more to read
        self.given = False  # its first delta is out
        self._index, self._names, self._stream = index, names, stream
        self._text = [head]
        self._next: Literal["object", "first key", "key", "colon", "value", "comma"] = "object"
        self._scanner: JsonScanner | None = None  # of the key or value we are inside of
        self._role: Role = "key"  # of that one, or of the value to come
        self._seen: set[Role] = set()
        self._word = ""  # of a key or a name, what came of it
        self._name: str | None = None
        self._arguments: list[str] = []  # not given out yet
        self._has_arguments = False

    @property
    def stands(self) -> bool:
        return self._name is not None and self._has_arguments

    @property
    def text(self) -> str:
        """All of it as it came; kept as long as nothing was given out."""
        return "".join(self._text)

    def take(self, text: str, at: int) -> int:
        """Read on from `at`, to where the call is over or the text ends."""
        start = at
        while at < len(text) and not self.over:
            at = self._structure(text, at) if self._scanner is None else self._value(self._scanner, text, at)
        if not self.given:
            self._text.append(text[start:at])
        return at

    def news(self) -> list[ToolCallDelta]:
        if self._name is None or not self._arguments or not (self._stream or self.stands):
            return []
        deltas = [] if self.given else [ToolCallDelta(self._index, "", f"call_{secrets.token_hex(12)}", self._name)]
        deltas.append(ToolCallDelta(self._index, "".join(self._arguments)))
        self.given = True
        self._arguments.clear()
        self._text.clear()
        return deltas

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
