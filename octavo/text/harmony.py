"""The format of gpt-oss: an answer of several messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>The user wants ...<|end|>                                         reasoning
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>
        {"city": "Paris"}<|call|>                                                                   a tool call
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>                             content

The splitter tells reasoning from content. It passes the message of a call on as it is, head and all, for the parser of calls.
An answer that does not begin with such a head is content, as answers of a forced form are.
"""

import re
from typing import Literal

from octavo.text.call_parser import AnswerPiece, CallParser
from octavo.text.tags import Piece, half_tag

CHANNEL, START, MESSAGE, CALL = "<|channel|>", "<|start|>", "<|message|>", "<|call|>"
ENDS = ("<|end|>", CALL, "<|return|>", START)
MAX_HEAD_CHARS = 200
END = re.compile("|".join(map(re.escape, ENDS)))
HEADS = re.compile(f"{re.escape(CHANNEL)}|{re.escape(START)}")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
TO = r"(?: +to=functions\.([a-zA-Z0-9_-]{1,64}))?"
CALL_HEAD = re.compile(
    rf"(?:<\|start\|>assistant)?{TO}<\|channel\|>[a-z]{{1,16}}{TO}[ a-z]{{0,16}}(?:<\|constrain\|>[a-z]{{1,16}})? ?<\|message\|>"
)


class HarmonySplitter:
    def __init__(self, in_thought: bool = False) -> None:
        """`in_thought`: whether the prompt ends inside a thought, which the answer continues."""
        self.thought = in_thought
        self.answering = False
        self._state: Literal["start", "head", "body", "plain"] = "body" if in_thought else "start"
        self._kind: Literal["reasoning", "content"] = "reasoning" if in_thought else "content"
        self._is_call = False
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        at = 0
        while at < len(text) and not self._held:
            at = self._step(text, at, pieces)
        return [piece for piece in pieces if piece.text]

    def flush(self) -> list[Piece]:
        text, self._held = self._held, ""
        return [Piece("tag" if self._state == "head" else self._kind, text)] if text else []

    def _step(self, text: str, at: int, pieces: list[Piece]) -> int:
        if self._state == "body":
            return self._body(text, at, pieces)
        if self._state == "plain" or (self._state == "start" and not _may_begin(text)):
            self._state, self.answering = "plain", True
            pieces.append(Piece("content", text[at:]))
            return len(text)
        return self._head(text, at, pieces)

    def _head(self, text: str, at: int, pieces: list[Piece]) -> int:
        end = text.find(MESSAGE, at, at + MAX_HEAD_CHARS)
        if end < 0 and len(text) - at < MAX_HEAD_CHARS:
            self._held = text[at:]
            return len(text)
        end = end + len(MESSAGE) if end >= 0 else at  # a head that does not end is the text of a message without one
        head = text[at:end]
        thinks = ANALYSIS.search(head) is not None
        self._kind = "reasoning" if thinks else "content"
        found = CALL_HEAD.fullmatch(head)
        self._is_call = found is not None and bool(found[1] or found[2])
        self.thought |= thinks
        self.answering |= not thinks
        self._state = "body"
        pieces.append(Piece("content" if self._is_call else "tag", head))
        return self._body(text, end, pieces, headless=True) if end == at else end

    def _body(self, text: str, at: int, pieces: list[Piece], headless: bool = False) -> int:
        """`headless`: the text begins where a head should, and may begin with its tag, which then belongs to it"""
        found = END.search(text, at + len(START) if headless and text.startswith(START, at) else at)
        end = min(half_tag(text, at, tag, spaces=False) for tag in ENDS) if found is None else found.start()
        pieces.append(Piece(self._kind, text[at:end]))
        if found is None:
            self._held = text[end:]
            return len(text)
        self._state = "head"
        if found.group() == START:  # belongs to the next head
            return end
        pieces.append(Piece("content" if self._is_call else "tag", found.group()))
        return found.end()


def begun_answer(thought: str, content: str) -> str:
    """Returns what the model has written of an answer so far. Without content, the thought is not over."""
    text = f"{CHANNEL}analysis{MESSAGE}{thought}"
    return f"{text}<|end|>{START}assistant{CHANNEL}final{MESSAGE}{content}" if content else text


def _may_begin(text: str) -> bool:
    return any(text.startswith(head) or head.startswith(text) for head in (CHANNEL, START))


class HarmonyParser(CallParser):
    """Reads calls out of messages that are for functions. Other heads are text, which the splitter takes away."""

    def _outside(self, text: str, at: int, pieces: list[AnswerPiece]) -> int:
        if self._behind_call and (end := self._closing(text, at, CALL)) > at:
            return end
        found = HEADS.search(text, at)
        place = min(half_tag(text, at, tag, spaces=False) for tag in (CHANNEL, START)) if found is None else found.start()
        self._say(text[at:place], pieces)
        if found is None:
            self._hold(text[place:])
            return len(text)
        limit = place + MAX_HEAD_CHARS
        head = CALL_HEAD.match(text, place, limit)
        if head is not None and (head[1] or head[2]):
            self._begin(head.group(), head[1] or head[2])
            return head.end()
        if head is None and len(text) < limit and MESSAGE not in text[place:]:
            self._hold(text[place:])
            return len(text)
        self._say(text[place : found.end()], pieces)
        return found.end()

    def _is_text_at_the_end(self, held: str) -> bool:
        return not CALL.startswith(held.strip())


def harmony_grammar(calls: list[str], parallel: bool) -> str:
    """Returns the rule `answer` (Lark) for one call or several. `calls`: the rules of their messages."""
    again = f'("{START}assistant" call)*' if parallel else ""
    return f"answer: call {again}\ncall: {' | '.join(calls)}\n"
