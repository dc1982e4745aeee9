"""Pieces of an answer: thinking, content, and tags, which belong to neither. A splitter tells them apart."""

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Literal["reasoning", "tag", "content"]
    text: str


class Splitter(Protocol):
    @property
    def thought(self) -> bool:
        """Whether there is any thinking, as far as is known."""
        ...

    @property
    def answering(self) -> bool:
        """Whether the thinking is over."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Takes the next text. Returns the pieces that are now certain: only what may still become a tag is held back."""
        ...

    def flush(self) -> list[Piece]:
        """Ends the answer. Returns what was held back, as the text that it looks like."""
        ...
