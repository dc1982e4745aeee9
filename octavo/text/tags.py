"""Tags in text that arrives in parts: `</think>`, `<tool_call>`. White space next to a tag belongs to it.

A splitter takes an answer apart into pieces: thinking, content, and tags, which belong to neither.

    "It is prime.\\n\\n</thi" | "nk>"      the tail that may become a tag is held back: at most MAX_SPACES and a half tag,
                                        so that no text, however odd, makes a part cost more than its length
"""

import re
from dataclasses import dataclass
from typing import Literal, Protocol

SPACE = " \t\r\n"
MAX_SPACES = 8

_SPACES = re.compile(f"[{SPACE}]*+")


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


def skip_space(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    assert found is not None
    return found.end()


def tag_start(text: str, start: int, place: int) -> int:
    """Returns where the white space before `place` begins: at most MAX_SPACES of it, and not before `start`."""
    first = max(start, place - MAX_SPACES)
    return first + len(text[first:place].rstrip(SPACE))


def half_tag(text: str, start: int, tag: str, spaces: bool = True) -> int:
    """Returns where the tail of the text that may still become `tag` begins, or the end of the text if there is none.

    Without `spaces`, white space does not belong to the tag.
    """
    place = text.find(tag[0], max(start, len(text) - len(tag) + 1))
    while place >= 0 and not tag.startswith(text[place:]):
        place = text.find(tag[0], place + 1)
    place = len(text) if place < 0 else place
    return tag_start(text, start, place) if spaces else place
