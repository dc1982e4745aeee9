"""Answers of a model that is open in this process."""

from collections.abc import Generator
from contextlib import closing

from octavo.cli.chat_session import CONTEXT_FULL, AnswerStats
from octavo.errors import EngineError, RequestError
from octavo.llm import LLM
from octavo.outputs import TextDelta
from octavo.sampling_params import SamplingParams
from octavo.text.prompt import Message
from octavo.text.reasoning import Piece, ReasoningSplitter

ROOM = 256  # tokens kept free for an answer of no stated length, where the context is not tiny


class LocalAnswers:
    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.model_name = llm.model_name
        self.max_model_len = llm.max_model_len
        self._llm = llm
        self._params = params

    def answer(self, messages: list[Message], is_last_try: bool, stats: AnswerStats) -> Generator[Piece, None, None]:
        prompt, ids = self._llm.encoder.encode_chat(messages)
        room = self._params.max_tokens or min(ROOM, self.max_model_len // 4)
        if not is_last_try and len(ids) + room > self.max_model_len:  # at last little room will do, if there is any
            raise RequestError("there is no room for an answer", "messages", CONTEXT_FULL)
        stats.prompt_tokens = len(ids)
        splitter, most_held = ReasoningSplitter(prompt), 0
        with closing(self._llm.stream(ids, self._params)) as stream:
            for delta in stream:
                pool = self._llm.stats()
                most_held = max(most_held, pool.num_blocks - 1 - pool.free_blocks)
                _note(stats, delta, f"blocks  {most_held} of {pool.num_blocks - 1} in use")
                yield from splitter.push(delta.text) + (splitter.flush() if delta.finish_reason is not None else [])
                if delta.finish_reason == "error":
                    raise EngineError(str(delta.stop_reason))


def _note(stats: AnswerStats, delta: TextDelta, work: str) -> None:
    stats.note(len(delta.token_ids))
    stats.work = work
    if delta.life is not None:
        stats.cached_tokens, stats.hit_reason = delta.life.cached_tokens, delta.life.hit_reason
