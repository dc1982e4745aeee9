"""What a request used: tokens as OpenAI counts them, and where the time went."""

import time
from collections.abc import Sequence

from octavo.engine.async_llm import Ask
from octavo.messages import LifeRecord
from octavo.outputs import TextDelta
from octavo.text.reasoning import ReasoningTokens


class Tally:
    """Of all prompts of a request, `n` samples each; a prompt is counted once, however many samples it has."""

    def __init__(self, asks: Sequence[Ask], thinking: Sequence[ReasoningTokens] = ()) -> None:
        """`thinking`: for each sample, where the model may think."""
        self._thinking = thinking
        self._n = asks[0].params.n
        self._prompt_tokens = sum(len(ask.prompt_token_ids) for ask in asks)
        self._lives: list[LifeRecord | None] = [None] * len(asks)
        self._completion_tokens = 0

    def count(self, news: Sequence[TextDelta]) -> None:
        for delta in news:
            self._completion_tokens += len(delta.token_ids)
            if self._thinking:
                self._thinking[delta.index].push(delta.token_ids)
            if delta.life is not None:
                self._lives[delta.index // self._n] = delta.life

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return self._completion_tokens

    @property
    def cached_tokens(self) -> int:
        return sum(life.cached_tokens for life in self._lives if life is not None)

    @property
    def reasoning_tokens(self) -> int:
        return sum(thought.count for thought in self._thinking)

    def usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def timings(self) -> dict[str, object]:
        """Milliseconds; of several prompts the longest of each, and why the first one's prefix was found or not."""
        spans = [_spans(life) for life in self._lives if life is not None]
        queue, prefill, decode = (round(1000 * max(times), 3) for times in zip(*spans, strict=True)) if spans else (0.0, 0.0, 0.0)
        return {
            "queue_ms": queue,
            "prefill_ms": prefill,
            "decode_ms": decode,
            "cached_tokens": self.cached_tokens,
            "preemptions": sum(life.preemptions for life in self._lives if life is not None),
            "hit_reason": None if self._lives[0] is None else self._lives[0].hit_reason,
        }


def _spans(life: LifeRecord) -> tuple[float, float, float]:
    """Seconds in the queue, from there to the first token, from there to the end; a sample that we ended has none in its record."""
    end = life.finished or time.monotonic()
    token = life.first_token or end
    start = life.first_scheduled or token
    return start - life.queued, token - start, end - token
