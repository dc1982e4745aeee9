"""`AsyncLLM`: engines in processes of their own, for asyncio. Prompts arrive as ids, and answers leave as text.

    start      supervisors start the engine processes, or this process connects to engines that another process supervises
    generate   checks a request and sends it to one engine; updates arrive once per step, become text and wait for their reader
    watch      sends heartbeats and checks the engines': an engine that is silent or stuck is as good as dead

With several engines, a load balancer chooses the engine of a request. If that engine dies, the request continues in another one with all
tokens received so far, and its reader sees a pause. With one engine, its death ends all open requests.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from copy import copy
from dataclasses import replace
from functools import reduce

from octavo.config import EngineConfig
from octavo.engine.output import OutputProcessor, check_params
from octavo.engine.pins import PinEntry, PinReconciler, PinRegistry
from octavo.engine.process import SpawnConfig
from octavo.engine.replica import RETRY_SECONDS, Replica, State
from octavo.engine.streams import LoadBalancer, Stream
from octavo.engine.supervisor import Serving, SocketFolder, lasting, spawn_config_of
from octavo.engine.wire import Abort, Add, Cached, Refused, ResetPrefixCache, Updates, frame_limit
from octavo.errors import DeadlineError, EngineError, OctavoError, OverloadError, RequestError, UnavailableError
from octavo.inspector.frames import ViewFrame
from octavo.loading.text_side import TextSide, open_text_side
from octavo.log import logger
from octavo.messages import AddRequest, EngineFacts, PinOrder, SchedulerStats
from octavo.outputs import TextDelta
from octavo.policy.pins import COMPUTE
from octavo.policy.request import check_request, given_seed
from octavo.text.prompt import PromptEncoder
from octavo.text.tokenizer import Tokenizer

TICK_SECONDS = 0.25
MOST_LOSSES = 2  # a request that loses so many engines in a row without a token in between may be the cause


class AsyncLLM:
    """Engines for one event loop. Call `start` first and `close` last."""

    def __init__(
        self, config: EngineConfig, serving: Serving | None = None, on_dead: Callable[[OctavoError], None] | None = None,
        address: str | None = None, text: TextSide | None = None, pins: PinRegistry | None = None,
    ) -> None:  # fmt: skip
        """`on_dead` is called with the reason if no engine will come back. `address`: of engines that another process supervises.

        `pins`: the registry that all API processes share. Without it, this process has its own.
        """
        text = text or open_text_side(config)
        self.config = config
        self.encoder: PromptEncoder = text.encoder
        self.sampling_defaults: Mapping[str, object] = text.sampling_defaults
        self.is_default_model = text.is_default_model
        self.replicas: list[Replica] = []
        self._text = text
        self._serving = serving or Serving()
        self._on_dead = on_dead
        self._folder = SocketFolder() if address is None else None
        self.address = address or self._folder.address  # type: ignore[union-attr]
        self.name = secrets.token_hex(4)  # this process's name on the engines' sockets, and the prefix of every request id
        self._outputs = OutputProcessor(text.tokenizer, self._abort_sample, keep_logprobs=False)
        self._streams: dict[str, Stream] = {}
        self._balancer = LoadBalancer(self._streams, self._serving.engines, self._serving.routing, config.enable_prefix_caching)
        self.pins = PinReconciler(pins or PinRegistry(), self.replicas, self._compute_pin, leads=self._folder is not None)
        self._decoding = asyncio.Lock()  # held by the reader whose turn it is to decode logprobs
        self._count = 0
        self._num_seeds = 0
        self._draining = self._broken = self._closed = False

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
        """The number of requests that have a reader."""
        return len(self._streams)

    @property
    def state(self) -> State:
        """Ready while one engine is."""
        if self._closed or self._broken:
            return "dead"
        if self._draining:
            return "draining"
        states = [replica.state for replica in self.replicas]
        if "ready" in states or "draining" in states:
            return "ready"
        return "loading" if not states or "loading" in states else "dead"

    @property
    def facts(self) -> EngineFacts:
        """The runtime config of the first engine that was ready; all have the same limits."""
        return next(replica.facts for replica in self.replicas if replica.facts is not None)

    @property
    def stats(self) -> SchedulerStats:
        """The numbers of all engines together."""
        return reduce(SchedulerStats.plus, [replica.stats for replica in self.replicas])

    @property
    def engine_pid(self) -> int | None:
        """The id of the first engine's process, if this process supervises it."""
        return self.replicas[0].pid if self.replicas else None

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Waits until all engines are ready. One is enough if another process supervises them, or if the others are spares.

        Raises the error that kept them from starting.
        """
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        limit = frame_limit(self.config, self._text.model)
        for number in range(self._serving.engines):
            address = self.address if number == 0 else f"{self.address}-{number}"
            self.replicas.append(Replica(number, address, self.name, self, self._serving, limit))
        self._watching = lasting(self._watch(), self._fail_to_go_on)
        if self._folder is not None:
            self._digest_key = secrets.token_bytes(32)
            self.replicas[0].supervise(self._spawn_config(self.replicas[0]))
        await self._ready

    def _spawn_config(self, replica: Replica) -> SpawnConfig:
        number, address, first = replica.number, replica.address, self.replicas[0].facts
        return spawn_config_of(self._text, self.config, self._serving, number, address, self._digest_key, first)

    async def drain(self, seconds: float) -> int:
        """Accepts no new requests and waits for the open ones, for some time. Returns how many did not end."""
        self._draining = True
        deadline = time.monotonic() + seconds
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return len(self._streams)

    async def close(self) -> None:
        """Ends the engine processes, if they are ours, and every open request. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams.values():
            self._abort(stream)
        self._fail_all(UnavailableError("the server is shutting down", RETRY_SECONDS))
        if self.replicas:
            self._watching.cancel()
            self.pins.close()
            await asyncio.gather(*(replica.close() for replica in self.replicas))
        if self._folder is not None:
            self._folder.remove()

    async def restart(self, seconds: float) -> None:
        """Replaces the engines, one after the other. Requests that are open after `seconds` continue in another engine."""
        assert self._folder is not None and len(self.replicas) > 1
        for replica in self.replicas:
            if replica.is_ready:  # otherwise it is being restarted anyway
                logger.info("Engine %d gets no new requests: it is replaced", replica.number)
                await replica.replace(seconds)
                logger.info("Engine %d is ready again", replica.number)

    async def reset_prefix_cache(self) -> None:
        """Makes the engines forget all cached blocks before the next request. Blocks in use are not found again."""
        for replica in self.replicas:
            if replica.is_there or len(self.replicas) == 1:  # an engine that is being restarted has an empty cache anyway
                replica.send(ResetPrefixCache())

    def view(self, engine: int = 0) -> AsyncGenerator[ViewFrame, None]:
        """Yields frames of an engine, to one reader at a time. The first frame, and the first after a restart of the engine, is full."""
        assert self._serving.inspector
        return self.replicas[engine].view.frames()

    def label(self, request_id: str) -> str:
        """Returns the label of a request, or its id if it has none or came from another process."""
        stream = self._streams.get(request_id)
        remembered = (replica.view.name(request_id) for replica in self.replicas)
        return (next(filter(None, remembered), None) if stream is None else stream.label) or request_id

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self, request: AddRequest, timeout: float | None = None, label: str = "", engine: int | None = None
    ) -> AsyncGenerator[list[TextDelta], None]:
        """Yields the updates since the last item, one delta for each sample that has any. Leaving the iteration aborts the request.

        The request gets its id, a seed if it has none, and its bad words as ids here. `timeout`: in seconds. `label`: seen by watchers.
        `engine`: the only one that it may go to.
        Raises RequestError, OverloadError, UnavailableError, DeadlineError and EngineError, before the first item if possible.
        """
        stream = self._open(request, label, engine)
        if timeout is not None:
            error = DeadlineError(f"the request was not done after {timeout:g} s")
            stream.timer = asyncio.get_running_loop().call_later(timeout, self._end, stream, error)
        try:
            self._place(stream)
            while updates := await stream.take():
                yield updates
        finally:
            self._drop(stream)

    async def _compute_pin(self, entry: PinEntry, order: PinOrder, replica: Replica) -> None:
        request = AddRequest("", entry.prompt_token_ids, COMPUTE, cache_salt=entry.cache_salt, pin=order)
        async with aclosing(self.generate(request, label="pin", engine=replica.number)) as updates:
            async for _ in updates:
                pass

    def new_seed(self) -> int:
        """Returns a seed for a request without one. `seed` of the engine determines which ones it returns."""
        self._num_seeds += 1
        number = self._serving.first_number + (self._num_seeds - 1) * self._serving.number_step
        return given_seed(self.config.seed, number)

    def _open(self, request: AddRequest, label: str, engine: int | None) -> Stream:
        """Checks a request and opens its stream, before it is sent: an answer may come at once."""
        if self.state != "ready":
            raise UnavailableError(f"the engine is {self.state}", RETRY_SECONDS)
        self._count += 1
        params = request.params
        words = request.bad_words or self.encoder.spellings(params.bad_words)
        check_params(params, self.config)
        params = copy(params)
        if params.seed is None:
            params.seed = self.new_seed()
        request = replace(request, request_id=f"{self.name}-{self._count}", params=params, bad_words=words)
        check_request(request, self.facts.limits)
        stream = Stream(request, self._text.tokenizer, self._decoding, label, engine)
        self._outputs.add(request, None, stream)
        self._streams[request.request_id] = stream
        return stream

    def _end(self, stream: Stream, error: OctavoError) -> None:
        """Ends a request here and in the engine. Its reader gets the error."""
        self._abort(stream)
        stream.fail(error)

    def _drop(self, stream: Stream) -> None:
        """Forgets a request that has no reader any more."""
        del self._streams[stream.request_id]
        for replica in self.replicas:
            if replica.view.names is not None:  # a client watches
                replica.view.remember(stream.request_id, stream.label)
        if stream.timer is not None:
            stream.timer.cancel()
        self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        self._outputs.drop(stream.request_id)
        if not stream.over:
            self._send_abort(stream)
        self._balancer.done(stream)

    def _abort_sample(self, request_id: str, index: int) -> None:
        self._send_abort(self._streams[request_id], index)

    def _send_abort(self, stream: Stream, index: int | None = None) -> None:
        if stream.replica is None or not stream.replica.is_there:
            return  # no engine has it
        try:
            stream.replica.send(Abort(stream.request_id, index))
        except UnavailableError:  # then the request ends there by itself
            logger.debug("could not abort %s: the engine cannot be reached", stream.request_id)

    def _fail_all(self, error: OctavoError) -> None:
        for stream in self._streams.values():
            self._fail(stream, error)

    def _fail(self, stream: Stream, error: OctavoError) -> None:
        """Ends a request that no engine has any more."""
        self._outputs.drop(stream.request_id)
        self._balancer.done(stream)
        stream.fail(error)

    # --- requests that move ------------------------------------------------------------------------------------------

    def _move(self, stream: Stream, reason: str) -> None:
        """Lets a request that has lost its engine continue in another one."""
        if stream.over:
            return
        stream.losses += 1
        if stream.losses == MOST_LOSSES:
            text = f"the request lost {MOST_LOSSES} engines in a row, and no token came between; the last one died: {reason}"
            self._fail(stream, EngineError(text, "engine_lost"))
            return
        stream.resume(self._outputs.open_outputs(stream.request_id))
        self._place(stream)

    def _place(self, stream: Stream) -> None:
        """Sends a request to an engine. If there are several and none can be reached, the request waits here for the first that can."""
        unreachable = set[int]()
        while replica := self._balancer.choose(stream, self.replicas, unreachable | stream.full):
            try:
                replica.send(Add(stream.request, moved=stream.resumed > 0))
            except UnavailableError:  # its death has not been noticed yet
                if len(self.replicas) == 1:
                    raise
                unreachable.add(replica.number)
            else:
                self._balancer.begin(stream, replica)
                return
        stream.waits = True

    def _find_room(self, stream: Stream) -> bool:
        """Sends a request that an engine has no room for to another one. Returns False if all engines have refused it."""
        assert stream.replica is not None
        stream.full.add(stream.replica.number)
        self._balancer.done(stream)
        if len(stream.full) == len(self.replicas) or stream.engine is not None:
            return False
        self._place(stream)
        return True

    # --- messages of engines ---------------------------------------------------------------------------------------------

    def on_ready(self, replica: Replica) -> None:
        assert replica.facts is not None
        self._balancer.meet(replica)
        if self._folder is not None and len(self.replicas) > 1 and replica is self.replicas[0]:
            for other in self.replicas:
                other.supervise(self._spawn_config(other))
        one_is_enough = self._folder is None or self._serving.routing == "first"
        if not self._ready.done() and (one_is_enough or all(each.is_ready for each in self.replicas)):
            self._ready.set_result(None)

    def on_updates(self, replica: Replica, updates: Updates) -> None:
        self._outputs.process(updates.deltas if len(self.replicas) == 1 else self._balancer.received(replica, updates.deltas))

    def on_refused(self, refused: Refused) -> None:
        stream = self._streams.get(refused.request_id)
        if stream is None:
            return
        if refused.kind == "overload":
            if not self._find_room(stream):
                self._fail(stream, OverloadError(refused.message, refused.retry_after))
        else:
            self._fail(stream, RequestError(refused.message, refused.param, refused.code))

    def on_cached(self, replica: Replica, cached: Cached) -> None:
        self._balancer.learn(replica, cached.change)

    def on_lost(self, replica: Replica) -> None:
        what = "a message between this process and the engine was lost"
        for stream in self._balancer.of(replica):
            self._send_abort(stream)
        for stream in self._balancer.leave(replica):
            if len(self.replicas) == 1:
                self._fail(stream, EngineError(what))
            else:
                self._move(stream, what)

    def on_down(self, replica: Replica, reason: str) -> None:
        streams = self._balancer.leave(replica)
        if len(self.replicas) == 1:
            self._fail_all(UnavailableError(f"the engine died: {reason}", RETRY_SECONDS, "engine_dead"))
            return
        if streams:
            logger.warning("Engine %d died with %d requests of this process, which go on elsewhere", replica.number, len(streams))
        for stream in streams:
            self._move(stream, reason)

    def on_stays_dead(self, replica: Replica, error: OctavoError) -> None:
        if not self._ready.done() or all(each.stays_dead for each in self.replicas):
            self._fail_to_go_on(error)

    def _fail_to_go_on(self, error: OctavoError) -> None:
        self._broken = True
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self._on_dead is not None:
            self._on_dead(error)

    # --- whether they are alive ------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        last, slept = time.monotonic(), 0.0
        while True:
            for replica in self.replicas:  # if this process itself was stopped, it could not receive heartbeats
                replica.check(slept if slept > TICK_SECONDS + 1 else 0.0)
            await asyncio.sleep(TICK_SECONDS)
            for stream in self._balancer.waiting():
                self._place(stream)
            self._keep_folder()
            self.pins.check()
            slept, last = time.monotonic() - last, time.monotonic()

    def _keep_folder(self) -> None:
        """Restores the folder of the sockets if it is gone. The next engine and processes that connect to this one need it."""
        if self._folder is not None:
            with suppress(OSError):  # the code that needs the folder reports its absence
                self._folder.make_again()
