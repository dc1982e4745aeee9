"""`ChatSession` is a conversation that stays within the context length. It keeps the turns and the figures of the last answer.

    system | turn 1 | turn 2 | ... | question | room for the answer        <= the context
             the oldest turns are left out first; the system prompt and the question stay

Its `Answerer` is a model in this process (`LocalAnswers`) or a running server (`RemoteAnswers`).
"""

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from octavo.client.api import RemoteModel, RemoteServer, stream_body
from octavo.errors import EngineError, OctavoError, RemoteError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.text.reasoning import ReasoningSplitter
from octavo.text.tags import Piece

if TYPE_CHECKING:
    from octavo.inputs import Message
    from octavo.llm import LLM
    from octavo.outputs import TextDelta

CONTEXT_FULL = "context_length_exceeded"  # the code of an error
STATE_WORDS = {"no_state": "no state was kept after the rest of them", "state_evicted": "the next state was evicted"}


@dataclass(slots=True)
class Turn:
    question: str
    answer: str = ""  # without its thinking; grows while it streams


class AnswerStats:
    """The figures of one answer: times as the user sees them, and what the engine found in its cache."""

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.tokens = 0
        self.cached_tokens: int | None = None
        self.common_tokens = 0  # more than the cached ones if no state of a recurrent model was kept for the rest
        self.hit_reason: str | None = None
        self.work = ""  # a line about what the engine did
        self.first_token = self.seconds = 0.0
        self._start = time.perf_counter()

    def note(self, tokens: int) -> None:
        """Counts tokens that came just now."""
        self.tokens += tokens
        self.seconds = time.perf_counter() - self._start
        self.first_token = self.first_token or self.seconds

    def lines(self) -> list[str]:
        """Returns the figures as lines for the terminal."""
        later = max(self.seconds - self.first_token, 1e-9)
        rate = f", {(self.tokens - 1) / later:.1f} tokens/s" if self.tokens > 1 else ""
        lines = [f"answer  {self.tokens} tokens in {self.seconds:.2f} s: first after {self.first_token:.2f} s{rate}"]
        if self.prompt_tokens is not None and self.cached_tokens is not None:
            rest = STATE_WORDS.get(self.hit_reason or "", "") if self.common_tokens > self.cached_tokens else ""
            more = f": {self.common_tokens} were in the cache, but {rest}" if rest else ""
            reason = "" if self.hit_reason is None else f" ({self.hit_reason}{more})"
            lines.append(f"prompt  {self.prompt_tokens} tokens, {self.cached_tokens} of them cached{reason}")
        return [*lines, self.work] if self.work else lines


class Answerer(Protocol):
    """What answers the messages of a chat."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int | None:
        """The context length, or None if it is not known."""
        ...

    def answer(self, messages: "list[Message]", is_last_try: bool, stats: AnswerStats) -> Generator[Piece, None, None]:
        """Streams the answer. If the messages are too long, it raises an error with the code CONTEXT_FULL before the first piece.

        The caller then leaves out turns and asks again. `is_last_try`: nothing is left to leave out.
        """
        ...


class ChatSession:
    def __init__(self, answerer: Answerer, system: str | None, say: Callable[[str], None]) -> None:
        """`say` shows the user a note that is not part of an answer."""
        self.system = system
        self.turns: list[Turn] = []
        self.stats: AnswerStats | None = None
        self.answerer = answerer
        self._say = say

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """Streams the answer.

        If the caller stops early, the conversation keeps what came until then. After an error it keeps neither question nor answer.
        """
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
        """Removes the last turn and returns its question, or None if there is no turn."""
        return self.turns.pop().question if self.turns else None

    def messages(self, question: str | None = None, left_out: int = 0) -> "list[Message]":
        """Returns the conversation as messages, without the oldest `left_out` turns, and with the new question at its end."""
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[left_out:]:
            if answer := turn.answer.strip():  # a turn without an answer is not shown to the model
                messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": answer}]
        return messages if question is None else [*messages, {"role": "user", "content": question}]

    def _fitting(self, question: str) -> Generator[Piece, None, None]:
        """Streams the answer to as many of the earlier turns as fit. Turns that do not fit are removed from the conversation."""
        earlier = len(self.turns) - 1  # the last turn is the question itself
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


# -- answers of a model in this process

CHAT_DEFAULTS: dict[str, object] = {"temperature": 0.2, "top_p": 0.9, "max_tokens": None}
ROOM = 256  # tokens kept free for an answer without max_tokens, but never more than a quarter of the context


def chat_params(llm: "LLM", params: SamplingParams) -> SamplingParams:
    """Fills in what was not set: with the values that the model recommends or, where it recommends none, with CHAT_DEFAULTS."""
    return params.with_defaults(llm.sampling_defaults or CHAT_DEFAULTS).for_chat()


class LocalAnswers:
    """Answers of a model that is open in this process."""

    def __init__(self, llm: "LLM", params: SamplingParams) -> None:
        self.model_name = llm.model_name
        self.max_model_len = llm.max_model_len
        self._llm = llm
        self._params = params

    def answer(self, messages: "list[Message]", is_last_try: bool, stats: AnswerStats) -> Generator[Piece, None, None]:
        prompt, ids = self._llm.encoder.encode_chat(messages)
        room = self._params.max_tokens or min(ROOM, self.max_model_len // 4)
        if not is_last_try and len(ids) + room > self.max_model_len:  # on the last try any room is enough
            raise RequestError("there is no room for an answer", "messages", CONTEXT_FULL)
        stats.prompt_tokens = len(ids)
        splitter, most_held = ReasoningSplitter(prompt), 0
        with closing(self._llm.stream_chat(messages, self._params)) as stream:
            for delta in stream:
                pool = self._llm.stats()
                most_held = max(most_held, pool.num_blocks - 1 - pool.free_blocks)
                _note_delta(stats, delta, f"blocks  {most_held} of {pool.num_blocks - 1} in use")
                yield from splitter.push(delta.text) + (splitter.flush() if delta.finish_reason is not None else [])
                if delta.finish_reason == "error":
                    raise EngineError(str(delta.stop_reason))


def _note_delta(stats: AnswerStats, delta: "TextDelta", work: str) -> None:
    stats.note(len(delta.token_ids))
    stats.work = work
    if delta.life is not None:
        stats.cached_tokens, stats.hit_reason = delta.life.cached_tokens, delta.life.hit_reason
        stats.common_tokens = delta.life.common_tokens


# -- answers of a running server


class RemoteAnswers:
    """Answers of a running server, over /v1/chat/completions.

    It waits for each piece in the runner's loop, so that Ctrl-C ends the wait and closes the connection.
    """

    def __init__(self, runner: asyncio.Runner, server: RemoteServer, model: RemoteModel, sampling: Mapping[str, object]) -> None:
        """`sampling`: fields of a request that the user set. The server chooses the others."""
        self.model_name = model.name
        self.max_model_len = model.max_model_len
        self._runner = runner
        self._server = server
        self._settings = {"model": model.name, "stream_options": {"include_usage": True}, "include_timings": True, **sampling}

    def answer(self, messages: "list[Message]", is_last_try: bool, stats: AnswerStats) -> Generator[Piece, None, None]:
        came: asyncio.Queue[Piece | None] = asyncio.Queue()

        def take(_now: float, event: dict[str, Any]) -> None:
            _note_event(stats, event)
            for piece in _pieces_of(event):
                came.put_nowait(piece)

        async def ask() -> None:
            try:
                await self._server.stream("/v1/chat/completions", stream_body({**self._settings, "messages": messages}), take)
            finally:
                came.put_nowait(None)

        asking, kind = self._runner.get_loop().create_task(ask()), "content"
        try:
            while (piece := self._runner.run(came.get())) is not None:
                if kind == "reasoning" and piece.kind == "content":
                    yield Piece("tag", "\n\n")  # the server removes the tag between thinking and answer
                kind = piece.kind
                yield piece
            self._runner.run(_result(asking))
        finally:
            asking.cancel()
            self._runner.run(_ended(asking))


async def _result(task: "asyncio.Task[None]") -> None:
    await task


async def _ended(task: "asyncio.Task[None]") -> None:
    """Waits until the task has ended, whether by an error or not."""
    await asyncio.gather(task, return_exceptions=True)


def _pieces_of(event: dict[str, Any]) -> list[Piece]:
    pieces = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content"):
            pieces.append(Piece("reasoning", thought))
        if text := delta.get("content"):
            pieces.append(Piece("content", text))
    return pieces


def _note_event(stats: AnswerStats, event: dict[str, Any]) -> None:
    """Takes the figures out of an event. Each piece counts as a token until the server says how many tokens there were."""
    if pieces := _pieces_of(event):
        stats.note(len(pieces))
    if usage := event.get("usage"):
        stats.prompt_tokens, stats.tokens = usage.get("prompt_tokens"), usage.get("completion_tokens", stats.tokens)
        stats.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if timings := event.get("timings"):
        stats.hit_reason, stats.common_tokens = timings.get("hit_reason"), timings.get("common_tokens", 0)
        spans = ", ".join(f"{name} {timings[f'{name}_ms']:.0f} ms" for name in ("queue", "prefill", "decode") if f"{name}_ms" in timings)
        stats.work = f"server  {spans}"
