"""Tool calls as Hermes and Qwen models write them, anywhere in an answer:

    Let me look.
    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

White space next to the tags belongs to them. A call stands by its object: a closing tag may be missing.
"""

import re

from octavo.text.call_parser import AnswerPiece, CallParser
from octavo.text.tags import MAX_SPACES, SPACE, half_tag, tag_start

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# in a template's source a new line may be written as one or as \n, and quotes with a backslash; others have XML in the tag
IN_TEMPLATE = re.compile(r"<tool_call>(?:\\n|\s)*\{\\?[\"'](?:name|arguments)")


class HermesParser(CallParser):
    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        if self._behind_call and (end := self._closing(text, at)) > at:
            return end
        place = text.find(OPEN, at)
        end = half_tag(text, at, OPEN) if place < 0 else tag_start(text, at, place)
        self._say(text[at:end], pieces)
        if place < 0:
            self._hold(text[end:])
            return len(text)
        self._begin(text[end : place + len(OPEN)])
        return place + len(OPEN)

    def _closing(self, text: str, at: int) -> int:
        """Behind a call: where its closing tag ends, or the text, if it may be the head of one."""
        rest = text[at : at + MAX_SPACES + len(CLOSE)]
        tag = rest.lstrip(SPACE)
        spaces = len(rest) - len(tag)
        if spaces > MAX_SPACES:
            return at
        if tag.startswith(CLOSE):
            return at + spaces + len(CLOSE)
        if CLOSE.startswith(tag):
            self._hold(rest)
            return len(text)
        return at

    def _is_text_at_the_end(self, held: str) -> bool:
        return OPEN.startswith(held.lstrip(SPACE)) and bool(held.strip(SPACE))


def grammar(calls: list[str], parallel: bool) -> str:
    """The rule `answer` (Lark) for one call or several, `calls` being the rules of objects."""
    again = '("\\n" call)*' if parallel else ""
    return f'answer: call {again}\ncall: "{OPEN}\\n" ({" | ".join(calls)}) "\\n{CLOSE}"\n'
