"""`AsyncLLM`: an engine in a process of its own, for programs that use asyncio.

    the reader's event loop    `generate` turns what comes into outputs
    a thread's event loop      runs `engine.async_llm.AsyncLLM`

The thread lets any event loop use the engine, and lets opening and `shutdown` be plain calls, as they are in vLLM.
"""

import asyncio
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Never, TypeVar

from octavo import log
from octavo.config import EngineConfig, log_level
from octavo.engine.async_llm import AsyncLLM as Engines
from octavo.engine.batch import spread_priority
from octavo.engine.supervisor import Serving
from octavo.errors import EngineError, RequestError
from octavo.grammar.text import check_limits
from octavo.inputs import Prompt
from octavo.loading.text_side import TextSide, open_text_side
from octavo.messages import AddRequest, LifeRecord
from octavo.outputs import CompletionOutput, RequestOutput, TextDelta
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.vllm_names import ATTRIBUTES, explained, refuse_arguments

NO_LIMIT = 2**31 - 1
Result = TypeVar("Result")


class AsyncLLM:
    """An engine in a process of its own. Any event loop of this process may use it. Call `shutdown` at the end."""

    def __init__(self, config: EngineConfig) -> None:
        """Returns when the model is loaded."""
        log.setup(log_level("INFO"))
        self.config = config
        text = open_text_side(config)
        self._encoder = text.encoder
        self._sampling_defaults = text.sampling_defaults
        self._thread = _EngineThread(config, text)
        self._close = weakref.finalize(self, self._thread.close)
        self._requests: dict[str, _Inbox] = {}
        self._ids = map(str, itertools.count())

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "AsyncLLM":
        """`engine_args`: `AsyncEngineArgs(...)`, with the settings of `LLM`"""
        return cls(engine_args)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **unknown: Never,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes one prompt and yields outputs as `sampling_params.output_kind` says. Leaving the loop early aborts the request.

        `request_id`: a name for `abort`. `priority`: lower runs first, where scheduling_policy is priority.
        """
        refuse_arguments(AsyncLLM.generate, unknown)
        name = next(self._ids) if request_id is None else request_id
        if name in self._requests:
            raise RequestError(f"request_id {name!r} is that of a request that has not ended; give another one", "request_id")
        params = copy(sampling_params or self.get_default_sampling_params())
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params must be SamplingParams", "sampling_params")
        inbox = self._requests[name] = _Inbox(params.output_kind is RequestOutputKind.FINAL_ONLY)
        try:
            text, request = await asyncio.to_thread(self._request, prompt, params, priority)
            answer = _Answer(name, text, request)
            inbox.feed = self._engine_thread.feed(request, name, inbox)
            while not answer.finished:
                deltas = await inbox.take()
                if deltas or inbox.aborted:
                    yield answer.add(deltas, inbox.aborted)
        finally:
            del self._requests[name]
            if inbox.feed is not None:
                inbox.feed.cancel()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests. Each `generate` yields a last output, whose finish_reason is abort. An unknown id is ignored."""
        for name in (request_id,) if isinstance(request_id, str) else request_id:
            if name in self._requests:
                self._requests[name].abort()

    def shutdown(self) -> None:
        """Ends the engine, and all requests with an error. A second call does nothing."""
        self._close()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what `generate` uses without `sampling_params`: what the model's makers recommend."""
        return SamplingParams().with_defaults(self._sampling_defaults).clone()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            raise AttributeError(f"AsyncLLM has no attribute {name!r}{explained(name, ATTRIBUTES)}")

    @property
    def _engine_thread(self) -> "_EngineThread":
        if not self._thread.is_alive:
            raise EngineError("this AsyncLLM is shut down, or belongs to a process that this one was forked from")
        return self._thread

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int) -> tuple[str | None, AddRequest]:
        text, token_ids = self._encoder.encode(prompt, self._engine_thread.max_model_len)
        if params.structured_outputs is not None:
            check_limits(params.structured_outputs)
        return text, AddRequest("", token_ids, params, spread_priority(priority, 1)[0])


class _EngineThread:
    """A thread with an event loop, which supervises the engine and reads what its requests give."""

    def __init__(self, config: EngineConfig, text: TextSide) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="octavo-engine", daemon=True)
        self._thread.start()
        self._engines: Engines | None = None
        self._feeds = set[asyncio.Task[None]]()
        try:
            self.max_model_len = self._submit(self._open(config, text)).result()
        except BaseException:  # it did not start, or Ctrl-C
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it runs. In a forked process it does not."""
        return self._thread.is_alive()

    def feed(self, request: AddRequest, name: str, inbox: "_Inbox") -> "Future[None]":
        """Sends a request to the engine. Cancelling what this returns aborts the request."""
        return self._submit(self._feed(request, name, inbox))

    def close(self) -> None:
        """Ends the engine process, open requests and the thread."""
        if threading.current_thread() is self._thread:  # it collects garbage just now, and cannot wait for itself
            self._loop.create_task(self._end()).add_done_callback(lambda _: self._loop.stop())
        elif self.is_alive:
            self._submit(self._end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self, config: EngineConfig, text: TextSide) -> int:
        self._engines = Engines(config, Serving(max_queue=NO_LIMIT), text=text)
        await self._engines.start()
        return self._engines.facts.limits.max_model_len

    async def _feed(self, request: AddRequest, name: str, inbox: "_Inbox") -> None:
        assert self._engines is not None
        task = asyncio.current_task()
        assert task is not None
        self._feeds.add(task)
        try:
            async with aclosing(self._engines.generate(request, label=name)) as updates:
                async for deltas in updates:
                    inbox.put(deltas)
            inbox.end()
        except Exception as error:  # whatever it is, its reader gets it
            inbox.end(error)
        finally:
            self._feeds.discard(task)

    async def _end(self) -> None:
        if self._engines is not None:
            await self._engines.close()
            await asyncio.gather(*self._feeds, return_exceptions=True)


class _Inbox:
    """What a request gives, on its way from the engine's thread to the event loop of its reader."""

    def __init__(self, whole: bool) -> None:
        """`whole`: the reader wants nothing before the end"""
        self.aborted = False
        self.feed: Future[None] | None = None  # which fills it
        self._whole = whole
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._deltas: deque[list[TextDelta]] = deque()
        self._ended = False
        self._error: Exception | None = None

    def put(self, deltas: list[TextDelta]) -> None:
        self._deltas.append(deltas)
        if not self._whole:
            self._wake()

    def end(self, error: Exception | None = None) -> None:
        self._error, self._ended = error, True
        self._wake()

    def abort(self) -> None:
        self.aborted = True
        if self.feed is not None:
            self.feed.cancel()
        self._wake()

    async def take(self) -> list[TextDelta]:
        """Returns what has come since the last call, as soon as there is anything. Raises the error that ended the request after it."""
        await self._filled.wait()
        self._filled.clear()
        found = list[TextDelta]()
        while self._deltas:
            found += self._deltas.popleft()
        if self._ended and not self.aborted and (self._whole or not found):
            if self._error is not None:
                raise self._error
            if not found:
                raise EngineError("the engine ended the request before its answer was complete")
        if self._ended:
            self._filled.set()
        return found

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody reads any more
            self._loop.call_soon_threadsafe(self._filled.set)


class _Answer:
    """The outputs of a request: all so far, and from them what its reader gets."""

    def __init__(self, name: str, prompt: str | None, request: AddRequest) -> None:
        self._only_new = request.params.output_kind is RequestOutputKind.DELTA
        self._logprobs = request.params.logprobs is not None
        samples = [self._empty(index) for index in range(request.params.n)]
        self._so_far = RequestOutput(name, prompt, request.prompt_token_ids, None, samples, False, 0, LifeRecord(time.monotonic()))

    @property
    def finished(self) -> bool:
        return self._so_far.finished

    def add(self, deltas: list[TextDelta], aborted: bool) -> RequestOutput:
        """Adds what has come. Returns the next output for the reader."""
        so_far, new = self._so_far, dict[int, CompletionOutput]()
        so_far.prompt_logprobs = None if self._only_new else so_far.prompt_logprobs
        if aborted:
            open_samples = [sample.index for sample in so_far.outputs if sample.finish_reason is None]
            deltas = deltas + [TextDelta(so_far.request_id, index, "", [], "abort") for index in open_samples]
        for delta in deltas:
            for sample in (so_far.outputs[delta.index], new.setdefault(delta.index, self._empty(delta.index))):
                _extend(sample, delta)
            new[delta.index].cumulative_logprob = so_far.outputs[delta.index].cumulative_logprob
            so_far.metrics = delta.life or so_far.metrics
            so_far.prompt_logprobs = delta.prompt_logprobs or so_far.prompt_logprobs
        so_far.num_cached_tokens = so_far.metrics.cached_tokens
        so_far.finished = all(sample.finish_reason is not None for sample in so_far.outputs)
        return replace(so_far, outputs=[*new.values()] if self._only_new else [_copied(sample) for sample in so_far.outputs])

    def _empty(self, index: int) -> CompletionOutput:
        return CompletionOutput(index, cumulative_logprob=0.0, logprobs=[]) if self._logprobs else CompletionOutput(index)


def _extend(sample: CompletionOutput, delta: TextDelta) -> None:
    sample.text += delta.text
    sample.token_ids += delta.token_ids
    if sample.logprobs is not None and sample.cumulative_logprob is not None and delta.logprobs is not None:
        sample.logprobs += delta.logprobs
        sample.cumulative_logprob += sum(choices[token].logprob for token, choices in zip(delta.token_ids, delta.logprobs))
    sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason


def _copied(sample: CompletionOutput) -> CompletionOutput:
    logprobs = None if sample.logprobs is None else sample.logprobs.copy()
    return replace(sample, token_ids=sample.token_ids.copy(), logprobs=logprobs)
