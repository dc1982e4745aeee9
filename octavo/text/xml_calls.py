"""Qwen3-Coder's form of tool calls: parameters in tags, whose texts become JSON.

    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value is text if the tool's schema says so. Else it is the JSON that it reads as, or text if it is none. A parameter is given out
when it is complete. JSON in the tag is read as Hermes' form is: forced calls have it.
"""

import json
import re
from collections.abc import Collection

from octavo.text.call_reader import CallReader, OneCall, ToolCallDelta, as_written
from octavo.text.tags import half_tag, skip_space

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
XML_TEMPLATE = re.compile(r"<function=")
NAME = re.compile(r"([^<>\n]{1,100}+)>")
HALF_NAME = re.compile(r"[^<>\n]{0,100}+")
Texts = Collection[tuple[str, str]]  # tools and their parameters that are text


class XmlReader(OneCall):
    def __init__(self, head: str, index: int, names: Collection[str], stream: bool, texts: Texts) -> None:
        super().__init__(head, index, names, stream)
        self._texts = texts
        self._key: str | None = None  # of the parameter we are inside of
        self._value: list[str] = []
        self._num_parameters = 0

    def take(self, text: str, at: int) -> int:
        """Reads on from `at`. Returns the place at which the call is over, or from which on it has to see more."""
        start = at
        while at < len(text) and not self.over:
            place = self._step(text, at)
            if place == at:
                break
            at = place
        self._keep(text[start:at])
        return at

    def _step(self, text: str, at: int) -> int:
        """Takes the next tag with its name, or some of a value. Returns `at` if more has to come first."""
        if self._key is not None:
            return self._in_value(self._key, text, at)
        place = skip_space(text, at)
        if place == len(text):
            return place
        if self._name is not None and text.startswith(END_FUNCTION, place):
            self.over = self.stands = True
            self._arguments.append("}" if self._num_parameters else "{}")
            return place + len(END_FUNCTION)
        tag = FUNCTION if self._name is None else PARAMETER
        rest = text[place : place + len(PARAMETER) + 101]
        if rest.startswith(tag):
            found = NAME.match(rest, len(tag))
            if found is not None:
                self._named(found[1])
                return place if self.over else place + found.end()
            self.over = not (len(rest) < len(tag) + 101 and HALF_NAME.fullmatch(rest, len(tag)))
        else:
            self.over = not (tag.startswith(rest) or (self._name is not None and END_FUNCTION.startswith(rest)))
        return place if self.over else at

    def _named(self, name: str) -> None:
        if self._name is None:
            self.over = name not in self._names
            self._name = None if self.over else name
        else:
            self._key = name

    def _in_value(self, key: str, text: str, at: int) -> int:
        place = text.find(END_PARAMETER, at)
        if place < 0:
            end = half_tag(text, at, END_PARAMETER)
            self._value.append(text[at:end])
            return end
        value = "".join([*self._value, text[at:place]]).removeprefix("\n").removesuffix("\n")
        separator = ", " if self._num_parameters else "{"
        self._arguments.append(f"{separator}{json.dumps(key)}: {as_json(value, (self._name, key) in self._texts)}")
        self._key, self._num_parameters = None, self._num_parameters + 1
        self._value.clear()
        return place + len(END_PARAMETER)


def as_json(value: str, is_text: bool) -> str:
    """Returns a value as JSON: as it reads, if it may be something else than text and is JSON."""
    if not is_text:
        try:
            return as_written(json.loads(value, parse_constant=_no_number))
        except (ValueError, RecursionError):
            pass
    return as_written(value)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class EitherReader:
    """Reads what its first character says: JSON, or tags."""

    def __init__(self, head: str, index: int, names: Collection[str], stream: bool, texts: Texts) -> None:
        self._json = CallReader(head, index, names, stream)
        self._xml = XmlReader(head, index, names, stream, texts)
        self._reader: CallReader | XmlReader = self._xml
        self._begun = False

    @property
    def over(self) -> bool:
        return self._reader.over

    @property
    def given(self) -> bool:
        return self._reader.given

    @property
    def stands(self) -> bool:
        return self._reader.stands

    @property
    def text(self) -> str:
        return self._reader.text

    def take(self, text: str, at: int) -> int:
        if not self._begun and (place := skip_space(text, at)) < len(text):
            self._begun = True
            self._reader = self._json if text[place] == "{" else self._xml
        if not self._begun:  # white space: both skip it
            self._json.take(text, at)
        return self._reader.take(text, at)

    def new_deltas(self) -> list[ToolCallDelta]:
        return self._reader.new_deltas()
