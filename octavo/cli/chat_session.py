"""A conversation that keeps within the context: turns, the prompt they make, and what the last answer cost.

    system | turn 1 | turn 2 | ... | question | room for the answer        <= max_model_len
             oldest turns are left out first; the system prompt and the question stay
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from octavo.errors import EngineError, OctavoError
from octavo.llm import LLM
from octavo.messages import LifeRecord
from octavo.outputs import TextDelta
from octavo.sampling_params import SamplingParams
from octavo.text.prompt import Message
from octavo.text.reasoning import Piece, ReasoningSplitter

ROOM = 256  # tokens kept free for an answer of no stated length, where the context is not tiny


@dataclass(slots=True)
class Turn:
    question: str
    answer: str = ""  # without its thinking; grows while it streams


class AnswerStats:
    """What a user would measure with a stop-watch, and what the engine says of its cache."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.tokens = 0
        self.blocks = self.num_blocks = 0  # held while it ran, of how many
        self.life: LifeRecord | None = None
        self.first_token = self.seconds = 0.0
        self._start = time.perf_counter()

    def note(self, delta: TextDelta, held: int, num_blocks: int) -> None:
        self.tokens += len(delta.token_ids)
        self.blocks, self.num_blocks = max(self.blocks, held), num_blocks
        self.life = delta.life or self.life
        self.seconds = time.perf_counter() - self._start
        self.first_token = self.first_token or self.seconds

    def lines(self) -> list[str]:
        later = max(self.seconds - self.first_token, 1e-9)
        rate = f", {(self.tokens - 1) / later:.1f} tokens/s" if self.tokens > 1 else ""
        lines = [f"answer  {self.tokens} tokens in {self.seconds:.2f} s: first after {self.first_token:.2f} s{rate}"]
        if self.life is not None:
            lines.append(f"prompt  {self.prompt_tokens} tokens, {self.life.cached_tokens} of them cached ({self.life.hit_reason})")
        return lines + [f"blocks  {self.blocks} of {self.num_blocks} in use"]


class ChatSession:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, say: Callable[[str], None]) -> None:
        """`say` tells the user what happens beside the answer."""
        self.system = system
        self.turns: list[Turn] = []
        self.stats: AnswerStats | None = None
        self.llm = llm
        self._params = params
        self._say = say

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """Stream the answer. Left early, what has come of it stays in the conversation; after an error, nothing does."""
        prompt, ids = self._fit(question)
        splitter, stats, turn = ReasoningSplitter(prompt), AnswerStats(len(ids)), Turn(question)
        self.turns.append(turn)
        self.stats = stats
        try:
            with closing(self.llm.stream(ids, self._params)) as stream:
                for delta in stream:
                    pool = self.llm.stats()
                    stats.note(delta, pool.num_blocks - 1 - pool.free_blocks, pool.num_blocks - 1)
                    pieces = splitter.push(delta.text) + (splitter.flush() if delta.finish_reason is not None else [])
                    for piece in pieces:
                        turn.answer += piece.text if piece.kind == "content" else ""
                        yield piece
                    if delta.finish_reason == "error":
                        raise EngineError(str(delta.stop_reason))
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

    def _fit(self, question: str) -> tuple[str, Sequence[int]]:
        """The prompt with as many turns as leave room for an answer; the others are dropped for good."""
        limit = self.llm.max_model_len
        room = self._params.max_tokens or min(ROOM, limit // 4)
        for left_out in range(len(self.turns) + 1):
            prompt, ids = self.llm.encoder.encode_chat(self.messages(question, left_out))
            if len(ids) + room <= limit:
                break
        else:
            room = self._params.max_tokens or 1  # the question alone leaves little room, or none
        if left_out and len(ids) + room <= limit:
            del self.turns[:left_out]
            gone = "oldest turn is" if left_out == 1 else f"oldest {left_out} turns are"
            self._say(f"the context of {limit} tokens is full: the {gone} left out")
        return prompt, ids
