"""Tells an answer's thinking from the answer while it streams.

    "<think>17 is odd..." | "</thi" held back | "nk>" | "It is prime."       thinking, thinking, answer

Thinking can only come first: a `<think>` in the middle of an answer is text. Every character comes out once, tags included.
"""

from dataclasses import dataclass
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    thinking: bool = False


class ThinkingSplitter:
    def __init__(self, prompt: str) -> None:
        """`prompt`: some templates open the thinking themselves."""
        self._state: Literal["start", "thinking", "answer"] = "thinking" if prompt.rstrip().endswith(OPEN) else "start"
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are now certain; what may still become a tag is held back."""
        self._held += text
        if self._state == "start":
            begin = self._held.lstrip()
            if len(begin) < len(OPEN) and OPEN.startswith(begin):
                return []
            self._state = "thinking" if begin.startswith(OPEN) else "answer"
        pieces = []
        if self._state == "thinking":
            place = self._held.find(CLOSE)
            end = place + len(CLOSE) if place >= 0 else len(self._held) - self._half_tag()
            pieces.append(Piece(self._held[:end], thinking=True))
            self._held = self._held[end:]
            if place < 0:
                return [piece for piece in pieces if piece.text]
            self._state = "answer"
        return [piece for piece in pieces + self.flush() if piece.text]

    def flush(self) -> list[Piece]:
        """The end: whatever is held back is what it looks like."""
        piece, self._held = Piece(self._held, self._state == "thinking"), ""
        return [piece] if piece.text else []

    def _half_tag(self) -> int:
        return next((length for length in range(len(CLOSE) - 1, 0, -1) if self._held.endswith(CLOSE[:length])), 0)
