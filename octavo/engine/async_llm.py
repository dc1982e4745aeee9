"""`AsyncLLM`: an engine in a process of its own, for asyncio. Text becomes ids before it and ids become text in it.

    start      a supervisor starts the engine process, or an engine that another process supervises is joined
    generate   checked here, sent; news come back by the step, are turned into text and wait for their reader
    watch      pings, and looks for signs of life: an engine that is silent or stuck is as good as dead
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from octavo.config import EngineConfig, log_level
from octavo.engine.link import Link, ViewStream
from octavo.engine.output import OutputPump, Stream, to_request
from octavo.engine.process import Orders
from octavo.engine.supervisor import Serving, SocketFolder, Supervisor, lasting
from octavo.engine.wire import Abort, Add, Beat, Hello, News, Refused, ResetPrefixCache, View, ViewFrame, frame_limit
from octavo.errors import DeadlineError, EngineError, OctavoError, OverloadError, RequestError, UnavailableError
from octavo.loading.text_side import TextSide, open_text_side
from octavo.log import logger
from octavo.messages import EngineFacts, RankNumbers, SchedulerStats
from octavo.outputs import TextDelta
from octavo.policy.door import check_request
from octavo.sampling_params import SamplingParams
from octavo.text.prompt import PromptEncoder
from octavo.text.tokenizer import Tokenizer

State = Literal["loading", "ready", "draining", "dead"]
TICK_SECONDS = 0.25
RETRY_SECONDS = 1.0  # what a client is told to wait


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, ready to be sent to the engine."""

    prompt: str | None  # its text, where it has one
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first, where scheduling_policy is priority
    cache_salt: str = ""  # prompts of different salts share no block
    timeout: float | None = None  # seconds; past them, DeadlineError
    label: str = ""  # what watchers call it
    bad_words: list[list[int]] | None = None  # params.bad_words as token ids; None: they are still to be spelled


class AsyncLLM:
    """An engine to use from one event loop. Call `start` first and `close` last."""

    def __init__(
        self, config: EngineConfig, serving: Serving | None = None, on_dead: Callable[[OctavoError], None] | None = None,
        address: str | None = None, text: TextSide | None = None,
    ) -> None:  # fmt: skip
        """`on_dead`: called with the reason if the engine will not come back. `address`: of an engine that another process supervises."""
        text = text or open_text_side(config)
        self.config = config
        self.encoder: PromptEncoder = text.encoder
        self.sampling_defaults: Mapping[str, object] = text.sampling_defaults
        self.state: State = "loading"
        self.stats = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self.ranks: list[RankNumbers] = []  # where there are several
        self.facts: EngineFacts
        self._text = text
        self._serving = serving or Serving()
        self._on_dead = on_dead
        self._folder = SocketFolder() if address is None else None
        self.address = address or self._folder.address  # type: ignore[union-attr]
        self._outputs = OutputPump(text.tokenizer, self._send_abort, keep_logprobs=False)
        self._streams: dict[str, Stream] = {}
        self._spelling = asyncio.Lock()
        self._count = 0
        self._last_sign = self._stalled = 0.0
        self._supervisor: Supervisor | None = None
        self._started = self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        if self._text.tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init is set", "skip_tokenizer_init")
        return self._text.tokenizer

    @property
    def text_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if there is none."""
        return self._text.tokenizer

    @property
    def num_open(self) -> int:
        """The number of requests that somebody waits for."""
        return len(self._streams)

    @property
    def engine_pid(self) -> int | None:
        """The id of the engine process, if this process supervises it."""
        return None if self._supervisor is None else self._supervisor.pid

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Waits until the engine is ready. Raises what kept it from starting."""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = Link(self.address, self, frame_limit(self.config, self._text.model))
        self._view = ViewStream(self._link)
        self._watching = lasting(self._watch(), self._on_engine_dead)
        self._started = True
        if self._folder is not None:
            serving = self._serving
            self._supervisor = Supervisor(self._orders(), serving.max_restarts, self._on_start, self._on_down, self._on_engine_dead)
        await self._ready

    def _orders(self) -> Orders:
        source, serving = self._text.source, self._serving
        return Orders(
            config=replace(self.config, model=str(source.path), revision=None),
            path=str(source.path),
            kind=source.kind,
            name=source.name,
            end_ids=self._text.model.eos_token_ids,
            address=self.address,
            epoch=0,
            max_queue=serving.max_queue,
            queue_timeout=serving.queue_timeout,
            log_level=log_level("INFO"),
            log_format=serving.log_format,
            step_seconds=serving.step_seconds,
            inspector=serving.inspector,
        )

    async def drain(self, seconds: float) -> int:
        """Takes no new requests and waits for the open ones, for some time. Returns how many did not end."""
        self.state = "draining"
        deadline = time.monotonic() + seconds
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return len(self._streams)

    async def close(self) -> None:
        """Ends the engine process, if it is ours, and every open request. Closing twice is harmless."""
        if self._closed:
            return
        self._closed, self.state = True, "dead"
        for stream in self._streams.values():
            self._abort(stream)
        self._fail_all(UnavailableError("the server is shutting down", RETRY_SECONDS))
        if self._started:
            self._watching.cancel()
            self._link.close()
            if self._supervisor is not None:
                await self._supervisor.stop()
        if self._folder is not None:
            self._folder.remove()

    async def reset_prefix_cache(self) -> None:
        """Makes the engine forget all cached blocks before the next request. Blocks that are in use are not found again."""
        self._link.send(ResetPrefixCache())

    def view(self) -> AsyncGenerator[ViewFrame, None]:
        """Gives frames of what the engine does, to one reader at a time. The first is full, also after a new start of the engine."""
        assert self._serving.inspector
        return self._view.frames()

    def label(self, request_id: str) -> str:
        """Returns the label of a request, or its id if it has none or came from another process."""
        stream = self._streams.get(request_id)
        return (self._view.name(request_id) if stream is None else stream.label) or request_id

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, ask: Ask) -> AsyncGenerator[list[TextDelta], None]:
        """Gives the news since the last item, one delta for each sample that has any. Leaving the iteration aborts the request.

        Raises RequestError, OverloadError, UnavailableError, DeadlineError and EngineError, before the first item where it can.
        """
        stream = self._submit(ask)
        try:
            while news := await stream.take():
                yield news
        finally:
            self._drop(stream)

    def _submit(self, ask: Ask) -> Stream:
        if self.state != "ready":
            raise UnavailableError(f"the engine is {self.state}", RETRY_SECONDS)
        self._count += 1
        request_id = f"{self._link.name}-{self._count}"
        words = self.encoder.spellings(ask.params.bad_words) if ask.bad_words is None else ask.bad_words
        request = to_request(request_id, ask.prompt_token_ids, ask.params, words, self.config, ask.priority, ask.cache_salt)
        check_request(request, self.facts.limits)
        self._link.send(Add(request))
        stream = self._streams[request_id] = Stream(request_id, self._text.tokenizer, self._spelling, ask.label)
        self._outputs.add(request, ask.prompt, stream)
        if ask.timeout is not None:
            error = DeadlineError(f"the request was not done after {ask.timeout:g} s")
            stream.timer = asyncio.get_running_loop().call_later(ask.timeout, self._end, stream, error)
        return stream

    def _end(self, stream: Stream, error: OctavoError) -> None:
        """Ends a request here and in the engine. Its reader gets the error."""
        self._abort(stream)
        stream.fail(error)

    def _drop(self, stream: Stream) -> None:
        """Forgets a request that nobody reads any more."""
        del self._streams[stream.request_id]
        self._view.remember(stream.request_id, stream.label)
        if stream.timer is not None:
            stream.timer.cancel()
        self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        self._outputs.drop(stream.request_id)
        if not stream.over and self._link.epoch:
            self._send_abort(stream.request_id)

    def _send_abort(self, request_id: str, index: int | None = None) -> None:
        try:
            self._link.send(Abort(request_id, index))
        except UnavailableError:  # then it ends there by itself
            logger.debug("could not abort %s: the engine cannot be reached", request_id)

    def _fail_all(self, error: OctavoError) -> None:
        for stream in self._streams.values():
            self._outputs.drop(stream.request_id)
            stream.fail(error)

    # --- what the engine says ----------------------------------------------------------------------------------------

    def on_hello(self, hello: Hello) -> None:
        self._fail_all(UnavailableError("the engine died: there is a new one", RETRY_SECONDS, "engine_dead"))  # if nobody has noticed yet
        self.facts = hello.facts
        self._last_sign, self._stalled = time.monotonic(), 0.0
        if self.state != "draining":
            self.state = "ready"
        self._view.begin_again()
        if self._supervisor is not None:
            self._supervisor.ready()
        if not self._ready.done():
            self._ready.set_result(None)

    def on_news(self, news: News) -> None:
        self._last_sign, self.stats = time.monotonic(), news.stats
        self._outputs.give(news.deltas)

    def on_refused(self, refused: Refused) -> None:
        stream = self._streams.get(refused.request_id)
        self._outputs.drop(refused.request_id)
        if stream is None:
            return
        if refused.kind == "overload":
            stream.fail(OverloadError(refused.message, refused.retry_after))
        else:
            stream.fail(RequestError(refused.message, refused.param, refused.code))

    def on_beat(self, beat: Beat) -> None:
        self._last_sign, self._stalled, self.stats, self.ranks = time.monotonic(), beat.stalled, beat.stats, beat.ranks

    def on_view(self, view: View) -> None:
        self._view.push(view.frame)

    def on_hangup(self) -> None:
        if self._supervisor is None and self._link.epoch:  # who supervises it knows, and why
            self._on_down("it hung up")

    def on_lost(self) -> None:
        self._view.begin_again()
        for stream in list(self._streams.values()):
            self._end(stream, EngineError("a message between this process and the engine was lost"))

    # --- whether it lives --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            self._link.ping()
            await asyncio.sleep(TICK_SECONDS)
            self._keep_folder()
            slept, last = time.monotonic() - last, time.monotonic()
            if slept > TICK_SECONDS + 1:  # this process was stopped itself: nothing was heard because nobody listened
                self._last_sign += slept
            if self._link.epoch and (verdict := self._verdict(last)):
                if self._supervisor is not None:
                    self._supervisor.kill(verdict)
                else:
                    self._on_down(verdict)

    def _keep_folder(self) -> None:
        """Makes the folder of the socket again if it is gone. The next engine and processes that join this one need it."""
        if self._folder is not None:
            with suppress(OSError):  # who needs it will say so
                self._folder.make_again()

    def _verdict(self, now: float) -> str:
        """Returns why the engine is as good as dead, or nothing if it is not."""
        if self._supervisor is not None and self._supervisor.is_stopped:
            return "it was stopped"
        if now - self._last_sign > self._serving.beat_timeout:
            return f"it gave no sign of life for {self._serving.beat_timeout:g} s"
        if self._stalled > self._serving.hang_timeout:
            return f"a step took more than {self._serving.hang_timeout:g} s"
        return ""

    def _on_start(self, epoch: int) -> None:
        self._link.least_epoch = epoch

    def _on_down(self, reason: str) -> None:
        self._link.forget()
        self._view.begin_again()
        if self.state != "draining":
            self.state = "dead"
        self._fail_all(UnavailableError(f"the engine died: {reason}", RETRY_SECONDS, "engine_dead"))

    def _on_engine_dead(self, error: OctavoError) -> None:
        self.state = "dead"
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self._on_dead is not None:
            self._on_dead(error)
