"""What parsers of tool calls share: an answer's text goes in as it comes, text and calls come out.

A family of models (`tool_calls_hermes.py`, `tool_calls_llama.py`) says where a call may begin; from there a `CallReader`
has the word. Whatever turns out to be no call comes out as text, every character of it, and is never run. Each character
is read a fixed number of times at most: the cost grows with the text, whatever it is.
"""

from collections.abc import Collection

from octavo.text.call_reader import CallReader, ToolCallDelta

AnswerPiece = str | ToolCallDelta


class CallParser:
    """Without a family: everything is text."""

    def __init__(self, names: Collection[str] = (), stream: bool = True) -> None:
        """`names` of the tools offered. Without `stream` a call comes out whole, and only if it stands."""
        self.num_calls = 0  # that stand
        self._names, self._stream = names, stream
        self._num_given = 0
        self._call: CallReader | None = None
        self._held = ""  # the tail of the text that may become something else
        self._behind_call = False  # nothing came since one that stands

    def push(self, text: str) -> list[AnswerPiece]:
        """What is now certain, in order."""
        text, self._held = self._held + text, ""
        pieces: list[AnswerPiece] = []
        at = 0
        while at < len(text):
            at = self._outside(text, at, pieces) if self._call is None else self._inside(self._call, text, at, pieces)
        return pieces

    def flush(self) -> list[AnswerPiece]:
        """The end: a call that does not stand is text, as is what was held back, but for what only follows a call."""
        pieces: list[AnswerPiece] = []
        if self._call is not None:
            self._end(self._call, pieces)
        if not self._behind_call or self._is_text_at_the_end(self._held):
            self._say(self._held, pieces)
        self._held = ""
        return pieces

    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        """Take what is no call, up to where one may begin; `_begin` it there, `_hold` what may be the head of one."""
        self._say(text[at:], pieces)
        return len(text)

    def _is_text_at_the_end(self, held: str) -> bool:
        """Whether what is held back behind a call is text, if nothing follows."""
        return True

    def _begin(self, head: str) -> None:
        self._call = CallReader(head, self._num_given, self._names, self._stream)

    def _inside(self, call: CallReader, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        at = call.take(text, at)
        pieces += call.news()
        if call.over:
            self._end(call, pieces)
        return at

    def _end(self, call: CallReader, pieces: list[AnswerPiece]) -> None:
        self._call = None
        self._num_given += call.given
        self.num_calls += call.stands
        if call.given:
            self._behind_call = call.stands
        else:
            self._say(call.text, pieces)

    def _hold(self, text: str) -> None:
        self._held = text

    def _say(self, text: str, pieces: list[AnswerPiece]) -> None:
        if text:
            self._behind_call = False
            pieces.append(text)
