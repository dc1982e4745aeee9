"""What the parsers of all forms of tool calls share: text around calls, what is held back, and what a broken call becomes."""

from collections.abc import Collection
from typing import Protocol

from octavo.text.call_reader import CallReader, ToolCallDelta
from octavo.text.tags import MAX_SPACES, SPACE

AnswerPiece = str | ToolCallDelta


class Reader(Protocol):
    """Reads one call, as `CallReader` does."""

    @property
    def over(self) -> bool: ...

    @property
    def given(self) -> bool: ...

    @property
    def stands(self) -> bool: ...

    @property
    def text(self) -> str: ...

    def take(self, text: str, at: int) -> int: ...

    def new_deltas(self) -> list[ToolCallDelta]: ...


class CallParser:
    """What all families share. Used by itself, it takes everything for text."""

    def __init__(self, names: Collection[str] = (), stream: bool = True) -> None:
        """`names`: of the tools offered. Without `stream`, a call is given out whole, and only if it is complete."""
        self.num_calls = 0  # complete ones
        self._names, self._stream = names, stream
        self._num_given = 0
        self._call: Reader | None = None
        self._held = ""  # the tail of the text that may become something else
        self._behind_call = False  # nothing came since a complete call

    def push(self, text: str) -> list[AnswerPiece]:
        """Takes the next text. Returns what is now certain, in order."""
        text, self._held = self._held + text, ""
        pieces: list[AnswerPiece] = []
        at = 0
        while at < len(text):
            at = self._outside(text, at, pieces) if self._call is None else self._inside(self._call, text, at, pieces)
        return pieces

    def flush(self) -> list[AnswerPiece]:
        """Ends the answer. Returns an incomplete call and what was held back as text, without what only follows a call."""
        pieces: list[AnswerPiece] = []
        if self._call is not None:
            self._end(self._call, pieces)
        if not self._behind_call or self._is_text_at_the_end(self._held):
            self._say(self._held, pieces)
        self._held = ""
        return pieces

    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        """Takes text up to where a call may begin, and begins it there. Holds back what may be the head of one. Returns the new place."""
        self._say(text[at:], pieces)
        return len(text)

    def _is_text_at_the_end(self, held: str) -> bool:
        """Whether what is held back behind a call is text, if nothing follows."""
        return True

    def _begin(self, head: str, name: str | None = None) -> None:
        """`name`: of the tool, if it stands in front of the arguments"""
        self._call = CallReader(head, self._num_given, self._names, self._stream, name)

    def _inside(self, call: Reader, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        at = call.take(text, at)
        pieces += call.new_deltas()
        if call.over:
            self._end(call, pieces)
        elif at < len(text):  # the reader wants to see more first
            self._hold(text[at:])
            return len(text)
        return at

    def _end(self, call: Reader, pieces: list[AnswerPiece]) -> None:
        self._call = None
        self._num_given += call.given
        self.num_calls += call.stands
        if call.given:
            self._behind_call = call.stands
        else:
            self._say(call.text, pieces)

    def _closing(self, text: str, at: int, tag: str) -> int:
        """Returns where the closing tag behind a call ends, the end of the text if the rest may be the head of one, or else `at`."""
        rest = text[at : at + MAX_SPACES + len(tag)]
        closing = rest.lstrip(SPACE)
        spaces = len(rest) - len(closing)
        if spaces > MAX_SPACES:
            return at
        if closing.startswith(tag):
            return at + spaces + len(tag)
        if tag.startswith(closing):
            self._hold(rest)
            return len(text)
        return at

    def _hold(self, text: str) -> None:
        self._held = text

    def _say(self, text: str, pieces: list[AnswerPiece]) -> None:
        if text:
            self._behind_call = False
            pieces.append(text)
