"""A conversation that stays within the context length: its turns, the messages made of them, and the figures of the last answer.

    system | turn 1 | turn 2 | ... | question | room for the answer        <= the context
             oldest turns are left out first; the system prompt and the question stay

`Answerer` is a model in this process (chat_local.py) or a running server (chat_remote.py).
"""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import OctavoError, RemoteError, RequestError
from octavo.text.prompt import Message
from octavo.text.reasoning import Piece

CONTEXT_FULL = "context_length_exceeded"  # code of the error that says so


@dataclass(slots=True)
class Turn:
    question: str
    answer: str = ""  # without its thinking; grows while it streams


class AnswerStats:
    """Times as the user sees them, and what the engine says of its cache."""

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.tokens = 0
        self.cached_tokens: int | None = None
        self.hit_reason: str | None = None
        self.work = ""  # a line about the engine's part in it
        self.first_token = self.seconds = 0.0
        self._start = time.perf_counter()

    def note(self, tokens: int) -> None:
        """So many tokens came."""
        self.tokens += tokens
        self.seconds = time.perf_counter() - self._start
        self.first_token = self.first_token or self.seconds

    def lines(self) -> list[str]:
        later = max(self.seconds - self.first_token, 1e-9)
        rate = f", {(self.tokens - 1) / later:.1f} tokens/s" if self.tokens > 1 else ""
        lines = [f"answer  {self.tokens} tokens in {self.seconds:.2f} s: first after {self.first_token:.2f} s{rate}"]
        if self.prompt_tokens is not None and self.cached_tokens is not None:
            reason = "" if self.hit_reason is None else f" ({self.hit_reason})"
            lines.append(f"prompt  {self.prompt_tokens} tokens, {self.cached_tokens} of them cached{reason}")
        return [*lines, self.work] if self.work else lines


class Answerer(Protocol):
    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int | None:
        """Where it is known."""
        ...

    def answer(self, messages: list[Message], is_last_try: bool, stats: AnswerStats) -> Generator[Piece, None, None]:
        """Stream the answer. Before its first piece it may raise an error with the code CONTEXT_FULL, and is then asked again
        with fewer turns, until nothing is left to leave out."""
        ...


class ChatSession:
    def __init__(self, answerer: Answerer, system: str | None, say: Callable[[str], None]) -> None:
        """`say` tells the user what happens beside the answer."""
        self.system = system
        self.turns: list[Turn] = []
        self.stats: AnswerStats | None = None
        self.answerer = answerer
        self._say = say

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """Stream the answer. Left early, what has come of it stays in the conversation; after an error, nothing does."""
        turn = Turn(question)
        self.turns.append(turn)
        try:
            with closing(self._fitting(question)) as pieces:
                for piece in pieces:
                    turn.answer += piece.text if piece.kind == "content" else ""
                    yield piece
        except OctavoError:
            self.turns.pop()
            raise

    def take_back(self) -> str | None:
        """Forget the last turn; its question, to ask it again."""
        return self.turns.pop().question if self.turns else None

    def messages(self, question: str | None = None, left_out: int = 0) -> list[Message]:
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[left_out:]:
            if answer := turn.answer.strip():  # one that was stopped at once is no turn for the model
                messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": answer}]
        return messages if question is None else [*messages, {"role": "user", "content": question}]

    def _fitting(self, question: str) -> Generator[Piece, None, None]:
        """The answer to a prompt with as many of the earlier turns as fit; the others are dropped for good."""
        earlier = len(self.turns) - 1  # the last one is that of the question
        for left_out in range(earlier + 1):
            is_last_try = left_out == earlier
            self.stats = AnswerStats()
            with closing(self.answerer.answer(self.messages(question, left_out), is_last_try, self.stats)) as pieces:
                try:
                    first = next(pieces, None)
                except (RequestError, RemoteError) as error:
                    if error.code != CONTEXT_FULL or is_last_try:
                        raise
                    continue
                self._drop(left_out)
                if first is not None:
                    yield first
                    yield from pieces
                return

    def _drop(self, left_out: int) -> None:
        if left_out == 0:
            return
        del self.turns[:left_out]
        gone = "oldest turn is" if left_out == 1 else f"oldest {left_out} turns are"
        context = "context" if self.answerer.max_model_len is None else f"context of {self.answerer.max_model_len} tokens"
        self._say(f"the {context} is full: the {gone} left out")
