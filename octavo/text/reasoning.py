"""Tells a model's thinking from its answer while both stream, for models that think between `<think>` and `</think>`.

`harmony.py` has the other form of thinking.

    "<think>\\n" | "17 is odd..." | "\\n</think>\\n\\n" | "It is prime."          tag, reasoning, tag, content

Thinking can only come first: a `<think>` in the middle of an answer is text. A thought that is never closed stays a thought. Every
character comes out once, so the pieces joined are the text. White space next to a tag is part of the tag.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from octavo.text import harmony
from octavo.text.harmony import CHANNEL, HarmonySplitter
from octavo.text.tags import MAX_SPACES, SPACE, Piece, Splitter, half_tag, tag_start

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    def __init__(self, prompt: str = "", in_thought: bool = False) -> None:
        """`prompt`: the rendered prompt, since some templates open the thinking themselves. `in_thought`: whether it ends inside a
        thought, which the answer continues."""
        self.thought = in_thought or prompt.rstrip().endswith(OPEN)  # whether there is any thinking, as far as is known
        self._state: Literal["start", "opened", "thinking", "closed", "answer"] = "thinking" if in_thought else "start"
        self._held = ""

    @property
    def answering(self) -> bool:
        return self._state in ("closed", "answer")

    def push(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        at = 0
        while at < len(text) and not self._held:
            at = self._step(text, at, pieces)
        return [piece for piece in pieces if piece.text]

    def flush(self) -> list[Piece]:
        text, self._held = self._held, ""
        return [Piece("reasoning" if self.thought and not self.answering else "content", text)] if text else []

    def _step(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Takes what belongs to one state. Returns the place at which the next begins."""
        match self._state:
            case "start":
                return self._start(text, pieces)
            case "opened" | "closed":
                end = len(text) - len(text[at:].lstrip(SPACE))
                pieces.append(Piece("tag", text[at:end]))
                if end < len(text):
                    self._state = "thinking" if self._state == "opened" else "answer"
                return end
            case "thinking":
                return self._thinking(text, at, pieces)
            case "answer":
                pieces.append(Piece("content", text[at:]))
        return len(text)

    def _start(self, text: str, pieces: list[Piece]) -> int:
        begin = text.lstrip(SPACE)
        spaces = len(text) - len(begin)
        if spaces <= MAX_SPACES and len(begin) < len(OPEN) and OPEN.startswith(begin):
            self._held = text
            return 0
        opens = spaces <= MAX_SPACES and begin.startswith(OPEN)  # also where the prompt did: some models say it again
        self.thought |= opens
        self._state = "opened" if self.thought else "answer"
        end = spaces + len(OPEN) if opens else 0
        pieces.append(Piece("tag", text[:end]))
        return end

    def _thinking(self, text: str, at: int, pieces: list[Piece]) -> int:
        place = text.find(CLOSE, at)
        end = half_tag(text, at, CLOSE) if place < 0 else tag_start(text, at, place)
        pieces.append(Piece("reasoning", text[at:end]))
        if place < 0:
            self._held = text[end:]
            return len(text)
        self._state = "closed"
        pieces.append(Piece("tag", text[end : place + len(CLOSE)]))
        return place + len(CLOSE)


class PlainSplitter:
    """A splitter for models that do not think, or whose thinking is not to be told apart: all is content."""

    thought, answering = False, True

    def push(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []

    def flush(self) -> list[Piece]:
        return []


class ReasoningTokens:
    """Counts the tokens of an answer that are thinking, tags included, up to the one that completes `</think>`.

    It reads tokens, not pieces: text comes later than its tokens do (half characters, stop strings), and several at once.
    """

    def __init__(self, prompt: str, token_bytes: Callable[[int], bytes], family: str = "think", in_thought: bool = False) -> None:
        self._splitter = reasoning_splitter(family, prompt, in_thought)
        self._token_bytes = token_bytes
        self._seen = 0

    def push(self, ids: Sequence[int]) -> None:
        for token in ids:
            if self._splitter.answering:
                return
            self._seen += 1
            self._splitter.push(self._token_bytes(token).decode("latin-1"))  # a tag is ASCII, whatever is around it

    @property
    def count(self) -> int:
        return self._seen if self._splitter.thought else 0


REASONING_PARSERS = ("auto", "think", "harmony", "none")


def reasoning_family(parser: str, template: str | None) -> str:
    """Returns what a setting means. `auto` means the form that the chat template mentions."""
    assert parser in REASONING_PARSERS
    if parser != "auto":
        return parser
    return "harmony" if CHANNEL in (template or "") else "think" if OPEN in (template or "") else "none"


def reasoning_splitter(family: str, prompt: str, in_thought: bool = False) -> Splitter:
    """Returns the splitter of one answer to the rendered prompt."""
    if family == "harmony":
        return HarmonySplitter(in_thought)
    return ReasoningSplitter(prompt, in_thought) if family == "think" else PlainSplitter()


def begun_answer(prompt: str, template: str, thought: str, content: str) -> str:
    """Returns a rendered prompt with what the model has written of its answer so far. Without content, the thought is not over."""
    if reasoning_family("auto", template) == "harmony":
        return prompt + harmony.begun_answer(thought, content)
    opened = prompt if prompt.rstrip().endswith(OPEN) else f"{prompt}{OPEN}\n"
    return f"{opened}{thought}\n{CLOSE}\n\n{content}" if content else opened + thought


def ends_in_thought(last_message: Mapping[str, object], options: Mapping[str, object]) -> bool:
    """Whether the answer continues a thought: it continues this message, which has no content yet."""
    return bool(options.get("continue_final_message") and last_message.get("reasoning_content") and not last_message.get("content"))


def behind_thought(rules: str, family: str, prompt: str, in_thought: bool = False) -> str:
    """Returns a grammar (llguidance's Lark) that lets a model think first and then requires `rules`, which define `answer`."""
    if family != "think" or (prompt.rstrip().endswith(CLOSE) and not in_thought):
        return f"start: answer\n{rules}"
    thought = "thought space" if in_thought or prompt.rstrip().endswith(OPEN) else f'("{OPEN}" thought space)?'
    space = f"/[ \\t\\r\\n]{{0,{MAX_SPACES}}}/"
    return f"start: {thought} answer\nspace: {space}\nthought[lazy]: /(.|\\n)*<\\/think>/\n{rules}"
