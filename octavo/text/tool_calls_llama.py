"""Tool calls as Llama 3 models write them: JSON is the whole answer, behind `<|python_tag|>` or not.

    {"name": "weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}

An answer that begins otherwise is text to its end, and so is what follows anything that is no call.
"""

import re

from octavo.text.call_parser import AnswerPiece, CallParser
from octavo.text.tags import SPACE

PYTHON_TAG, SEPARATOR = "<|python_tag|>", ";"
IN_TEMPLATE = re.compile(r"<\|python_tag\|>|\{\"name\": function name, \"parameters\":")
MAX_HEAD_CHARS = 40  # of white space, tag or separator in front of an object
FIRST = re.compile(rf"[{SPACE}]*(?:{re.escape(PYTHON_TAG)}[{SPACE}]*)?(?=\{{)")
LATER = re.compile(rf"[{SPACE}]*{SEPARATOR}[{SPACE}]*(?=\{{)")


class LlamaParser(CallParser):
    _is_text = False  # from here to the end

    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        head, tag = (LATER, SEPARATOR) if self._num_given else (FIRST, PYTHON_TAG)
        self._is_text |= self._num_given > self.num_calls  # one broke
        if not self._is_text and (found := head.match(text, at, at + MAX_HEAD_CHARS)):
            self._begin(found.group())
            return found.end()
        rest = text[at : at + MAX_HEAD_CHARS].lstrip(SPACE)
        if not self._is_text and len(text) - at < MAX_HEAD_CHARS and (tag.startswith(rest) or rest.rstrip(SPACE) == tag):
            self._hold(text[at:])
        else:
            self._is_text = True
            self._say(text[at:], pieces)
        return len(text)

    def _say(self, text: str, pieces: list[AnswerPiece]) -> None:
        self._is_text |= bool(text)
        super()._say(text, pieces)

    def _is_text_at_the_end(self, held: str) -> bool:
        return False  # a separator with nothing behind it


def grammar(calls: list[str], parallel: bool) -> str:
    """The rule `answer` (Lark) for one call or several, `calls` being the rules of objects."""
    again = f'("{SEPARATOR} " call)*' if parallel else ""
    return f"answer: call {again}\ncall: {' | '.join(calls)}\n"
