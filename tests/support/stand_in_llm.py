"""Stand-ins for `AsyncLLM` inside the process of a test: tests of routes need no engine process.

    StandInLLM    no engine: a real tokenizer, and an answer of as many words as were asked for
    InprocLLM     the engine of an `LLM`, stepped inside the event loop: the model's own text

Both remember what they were asked. A test may set `pause`, so that an answer takes its time; `script`, the pieces of text to answer
with; and `trouble`, an error that comes in place of the news after so many.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import ClassVar

from octavo import LLM
from octavo.engine.pins import PinReconciler, PinRegistry
from octavo.engine.replica import State
from octavo.errors import DeadlineError, RequestError
from octavo.inspector.frames import ViewFrame
from octavo.messages import AddRequest, EngineFacts, FinishReason, Limits, RankNumbers, SchedulerStats
from octavo.outputs import RequestOutput, TextDelta
from octavo.text.prompt import PromptEncoder
from octavo.text.tokenizer import Tokenizer
from tests.support.tokenizers import stories_metadata

TEMPLATE = "{% if tools %}<tools>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
News = AsyncGenerator[list[TextDelta], None]


@dataclass
class StandInLLM:
    state: State = "ready"
    pause: float = 0.0  # seconds between two deltas
    asked: list[AddRequest] = field(default_factory=list)
    timeouts: list[float | None] = field(default_factory=list)  # of each of these
    seeds: Iterator[int] = field(default_factory=itertools.count)  # for requests without one
    resets: int = 0
    script: list[str] = field(default_factory=list)
    trouble: tuple[int, Exception] | None = None

    template = TEMPLATE
    text_tokenizer = None
    is_default_model = False
    number = 0  # it is its only engine, too
    ranks: ClassVar[list[RankNumbers]] = []
    pins = PinReconciler(PinRegistry(), [], compute=None, leads=False)  # type: ignore[arg-type]  # it has no engine that could

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_gguf({**stories_metadata(), "tokenizer.chat_template": self.template}, "tok512.bin")
        self.encoder = PromptEncoder(self.tokenizer, None)
        self.facts = EngineFacts("stand-in", 1, Limits(8, 64, 256, self.tokenizer.vocab_size, 64, 16))
        self.sampling_defaults: dict[str, object] = {}
        self.stats = SchedulerStats(0, 0, 63, 64, 0, 0, 0, 0, 0)

    @property
    def replicas(self) -> "list[StandInLLM]":
        return [self]

    async def generate(self, request: AddRequest, timeout: float | None = None, label: str = "") -> News:
        self.asked.append(request)
        self.timeouts.append(timeout)
        async with aclosing(self._scripted(request) if self.script else self._answer(request, timeout)) as news:
            for count in itertools.count():
                if self.trouble is not None and count == self.trouble[0]:
                    raise self.trouble[1]
                if (deltas := await anext(news, None)) is None:
                    return
                yield deltas

    def new_seed(self) -> int:
        return next(self.seeds)

    async def _scripted(self, request: AddRequest) -> News:
        for place, text in enumerate(self.script, 1):
            end: FinishReason | None = "stop" if place == len(self.script) else None
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            yield [TextDelta("scripted", index, text, ids, end) for index in range(request.params.n)]

    async def _answer(self, request: AddRequest, timeout: float | None = None) -> News:
        count = request.params.max_tokens or 16
        for number in range(count):
            await asyncio.sleep(self.pause)
            end: FinishReason | None = "length" if number == count - 1 else None
            yield [TextDelta("r", index, " word", [7], end) for index in range(request.params.n)]

    def prompt(self, number: int = -1) -> str:
        """The text of a request that was asked."""
        return self.tokenizer.decode(self.asked[number].prompt_token_ids, skip_special_tokens=False)

    async def view(self, engine: int = 0) -> AsyncIterator[ViewFrame]:
        yield ViewFrame(True, 0.0, 0.0)
        await asyncio.sleep(0.1)

    def label(self, request_id: str) -> str:
        return request_id

    async def start(self) -> None:
        pass

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def close(self) -> None:
        self.state = "dead"


class Queued:
    """A reader whose news wait in a queue."""

    def __init__(self, queue: asyncio.Queue[TextDelta]) -> None:
        self.push = queue.put_nowait

    def finish(self, output: RequestOutput) -> None:
        """The last delta has told that already."""


class InprocLLM(StandInLLM):
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._ids = itertools.count()
        self._queues: dict[str, asyncio.Queue[TextDelta]] = {}
        self._stepping: asyncio.Task[None] | None = None
        super().__init__()

    def __post_init__(self) -> None:
        llm = self._llm
        self.encoder, self.tokenizer, self.sampling_defaults = llm.encoder, llm.get_tokenizer(), llm.sampling_defaults
        limits = llm._core.scheduler.limits
        self.facts = EngineFacts("stories", 1, replace(limits, max_num_batched_tokens=64))

    @property
    def stats(self) -> SchedulerStats:
        return self._llm.stats()

    @property
    def is_idle(self) -> bool:
        stats = self.stats
        return not (self._queues or stats.running or stats.waiting) and stats.free_blocks == stats.num_blocks - 1

    async def _answer(self, request: AddRequest, timeout: float | None = None) -> News:
        for name, value in (("logprobs", request.params.logprobs), ("prompt_logprobs", request.params.prompt_logprobs)):
            if value is not None and value > self._llm.config.max_logprobs:
                raise RequestError(f"{name} is {value}, max_logprobs is {self._llm.config.max_logprobs}", name)
        name = f"r{next(self._ids)}"
        assert len(request.bad_words) >= len(request.params.bad_words), "a server spells them"
        request = replace(request, request_id=name)
        self._llm._core.add(request)
        queue = self._queues[name] = asyncio.Queue()
        self._llm._outputs.add(request, None, Queued(queue))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        deadline = time.monotonic() + (timeout or 1e6)
        left = request.params.n
        try:
            while left:
                news = [await queue.get()]
                while not queue.empty():
                    news.append(queue.get_nowait())
                if time.monotonic() > deadline:
                    raise DeadlineError(f"the request was not done after {timeout:g} seconds")
                yield news
                left -= sum(delta.finish_reason is not None for delta in news)
        finally:
            self._llm._drop([name])
            del self._queues[name]

    async def _step(self) -> None:
        while self._queues:
            self._llm._pump()
            await asyncio.sleep(self.pause)
