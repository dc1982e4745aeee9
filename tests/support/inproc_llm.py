"""`AsyncLLM` without a second process: an engine steps inside the event loop, so that tests of routes see real text quickly.

A test may set `pause`, so that an answer takes its time, `trouble`, an error in place of the news after so many, and `script`,
the pieces of text that come instead of the model's.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from octavo import LLM
from octavo.engine.async_llm import Ask
from octavo.errors import DeadlineError, RequestError
from octavo.messages import AddRequest, EngineFacts, FinishReason, SchedulerStats
from octavo.outputs import RequestOutput, TextDelta


class Queued:
    """A reader whose news wait in a queue."""

    def __init__(self, queue: asyncio.Queue[TextDelta]) -> None:
        self.push = queue.put_nowait

    def finish(self, output: RequestOutput) -> None:
        """The last delta has told that already."""


class InprocLLM:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._ids = itertools.count()
        self._queues: dict[str, asyncio.Queue[TextDelta]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.state = "ready"
        self.encoder, self.tokenizer, self.sampling_defaults = llm.encoder, llm.get_tokenizer(), llm.sampling_defaults
        limits = llm._core.scheduler.limits  # type: ignore[attr-defined]
        self.facts = EngineFacts("stories", 1, replace(limits, max_num_batched_tokens=64))
        self.pause = 0.0
        self.trouble: tuple[int, Exception] | None = None
        self.script: list[str] = []
        self.asked: list[Ask] = []

    @property
    def stats(self) -> SchedulerStats:
        return self._llm.stats()

    @property
    def is_idle(self) -> bool:
        stats = self.stats
        return not (self._queues or stats.running or stats.waiting) and stats.free_blocks == stats.num_blocks - 1

    async def generate(self, ask: Ask) -> AsyncGenerator[list[TextDelta], None]:
        self.asked.append(ask)
        for name, value in (("logprobs", ask.params.logprobs), ("prompt_logprobs", ask.params.prompt_logprobs)):
            if value is not None and value > self._llm.config.max_logprobs:
                raise RequestError(f"{name} is {value}, max_logprobs is {self._llm.config.max_logprobs}", name)
        if self.script:
            for place, text in enumerate(self.script, 1):
                end: FinishReason | None = "stop" if place == len(self.script) else None
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                yield [TextDelta("scripted", index, text, ids, end) for index in range(ask.params.n)]
            return
        name = f"r{next(self._ids)}"
        assert ask.bad_words is not None, "a server spells them"
        request = AddRequest(name, ask.prompt_token_ids, ask.params, ask.priority, ask.cache_salt, ask.bad_words)
        self._llm._core.add(request)
        queue = self._queues[name] = asyncio.Queue()
        self._llm._outputs.add(request, ask.prompt, Queued(queue))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        deadline = time.monotonic() + (ask.timeout or 1e6)
        left = ask.params.n
        try:
            for count in itertools.count():
                if self.trouble is not None and count == self.trouble[0]:
                    raise self.trouble[1]
                news = [await queue.get()]
                while not queue.empty():
                    news.append(queue.get_nowait())
                if time.monotonic() > deadline:
                    raise DeadlineError(f"the request was not done after {ask.timeout:g} seconds")
                yield news
                left -= sum(delta.finish_reason is not None for delta in news)
                if not left:
                    return
        finally:
            self._llm._drop([name])
            del self._queues[name]

    async def _step(self) -> None:
        while self._queues:
            self._llm._pump()
            await asyncio.sleep(self.pause)
