"""A stand-in for `AsyncLLM`: a real tokenizer, no engine. It says `word` n times, slowly if asked to, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from octavo.engine.async_llm import Ask, State
from octavo.engine.view_frame import ViewFrame
from octavo.messages import EngineFacts, Limits, SchedulerStats
from octavo.outputs import TextDelta
from octavo.text.prompt import PromptEncoder
from octavo.text.tokenizer import Tokenizer
from tests.support.tokenizers import stories_metadata

TEMPLATE = "{% if tools %}<tools>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@dataclass
class StandInLLM:
    state: State = "ready"
    pause: float = 0.0  # seconds between two deltas
    asked: list[Ask] = field(default_factory=list)
    resets: int = 0

    template = TEMPLATE

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_gguf({**stories_metadata(), "tokenizer.chat_template": self.template}, "tok512.bin")
        self.encoder = PromptEncoder(self.tokenizer, None)
        self.facts = EngineFacts("stand-in", 1, Limits(8, 64, 256, self.tokenizer.vocab_size, 64, 16))
        self.sampling_defaults: dict[str, object] = {}
        self.stats = SchedulerStats(0, 0, 63, 64, 0, 0, 0, 0, 0)

    async def generate(self, ask: Ask) -> AsyncIterator[list[TextDelta]]:
        self.asked.append(ask)
        count = ask.params.max_tokens or 16
        for number in range(count):
            await asyncio.sleep(self.pause)
            end = "length" if number == count - 1 else None
            yield [TextDelta("r", index, " word", [7], end) for index in range(ask.params.n)]  # type: ignore[arg-type]

    text_tokenizer = None

    async def view(self) -> AsyncIterator[ViewFrame]:
        yield ViewFrame(True, 0.0, 0.0)
        await asyncio.sleep(0.1)

    async def start(self) -> None:
        pass

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def close(self) -> None:
        self.state = "dead"
