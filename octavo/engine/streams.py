"""The open requests of one API process.

    Stream          one request: the engine that has it, and its updates, which wait here until they are read
    LoadBalancer    which engine has which request, and which engine the next one goes to

    choose ──► begin ──► received, received ... ──► done
                 ▲              │ its engine died
                 └─── resume ───┘                  the tokens received so far go with it, as its output
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from octavo.engine.output import UnspelledDelta
from octavo.engine.replica import Replica
from octavo.engine.routing import Choice, Policy, Routing
from octavo.errors import EngineError, OctavoError, RequestError, UnavailableError
from octavo.messages import AddRequest, CacheChange, Delta, LifeRecord
from octavo.outputs import RequestOutput, TextDelta
from octavo.policy.prefix_matcher import Digests
from octavo.text.tokenizer import Tokenizer

TURN_LOGPROBS = 16  # deltas with logprobs that are decoded before other readers get a turn: about 0.2 ms each


class Stream:
    """One request from its arrival until its reader leaves. If the reader is slow, its updates are merged.

    Logprobs take ten times as long as text. Their readers decode them one after another, so that other updates do not wait for all of
    them.
    """

    __slots__ = (
        "_begun", "_decoding", "_error", "_finished", "_life", "_life_before", "_loop", "_tokenizer", "_updates", "_waiter",
        "blocks", "choice", "engine", "full", "label", "losses", "replica", "request", "resumed", "timer", "waits",
    )  # fmt: skip

    def __init__(
        self, request: AddRequest, tokenizer: Tokenizer | None, decoding: asyncio.Lock, label: str = "", engine: int | None = None
    ) -> None:
        """`decoding` is held by the reader whose turn it is to decode logprobs. `engine`: the only one that the request may go to."""
        self.request = request
        self.label = label  # the name that watchers see
        self.timer: asyncio.TimerHandle | None = None  # of the request's deadline
        self.engine = engine
        self.replica: Replica | None = None  # the engine that has it
        self.waits = False  # no engine could be reached, so it waits for one
        self.choice: Choice | None = None  # why this engine; None if there is only one
        self.blocks: list[bytes] = []  # short digests of its prompt, by which an engine is chosen
        self.full = set[int]()  # engines that had no room for it
        self.losses = 0  # engines lost in a row without a token in between
        self.resumed = 0  # how often it continued in another engine
        self._begun = time.monotonic()
        self._life: LifeRecord | None = None  # the latest record
        self._life_before: LifeRecord | None = None  # the record when it lost its engine
        self._tokenizer = tokenizer
        self._decoding = decoding
        self._loop = asyncio.get_running_loop()
        self._updates: list[TextDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False
        self._error: OctavoError | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def over(self) -> bool:
        """Returns whether no more updates will come."""
        return self._finished or self._error is not None

    def push(self, delta: TextDelta) -> None:
        if delta.finish_reason == "error":
            self.fail(error_of(delta))
            return
        self._updates.append(delta)
        self._wake()

    def finish(self, output: RequestOutput) -> None:
        self._finished = True
        self._wake()

    def fail(self, error: OctavoError) -> None:
        """Ends the stream with an error. Updates that came before it are read first."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[TextDelta]:
        """Waits for updates and returns them, or nothing at the end."""
        while not (self._updates or self.over):
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._updates and isinstance(self._updates[0], UnspelledDelta):
            return await self._take_decoded()
        updates, self._updates = self._updates, []
        if not updates and self._error is not None:
            raise self._error
        return updates if len(updates) < 2 else merged(updates)

    async def _take_decoded(self) -> list[TextDelta]:
        async with self._decoding:
            await asyncio.sleep(0)
            updates, self._updates = self._updates[:TURN_LOGPROBS], self._updates[TURN_LOGPROBS:]
            deltas = merged(updates)
            for delta in deltas:
                if isinstance(delta, UnspelledDelta):
                    delta.spell(self._tokenizer)
            return deltas

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- if its engine dies ------------------------------------------------------------------------------------------

    def resume(self, outputs: dict[int, list[int]]) -> None:
        """Prepares the request to continue in another engine. `outputs`: the tokens so far of each sample that has not ended."""
        self.request = self.request.resumed(outputs)
        self.resumed += 1
        self.full.clear()  # a request that moves is never refused
        self._life_before = self._life or LifeRecord(self._begun)

    def extended(self, life: LifeRecord) -> LifeRecord:
        """Returns an engine's record, extended by what happened in earlier engines and by the engine's number."""
        assert self.replica is not None and self.choice is not None
        before = self._life_before
        if before is not None:
            again = 0 if before.first_token is None else len(self.request.prompt_token_ids) - life.cached_tokens
            life = replace(
                life,
                queued=before.queued,
                first_scheduled=before.first_scheduled or life.first_scheduled,
                first_token=before.first_token or life.first_token,
                preemptions=before.preemptions + life.preemptions,
                recomputed_tokens=before.recomputed_tokens + life.recomputed_tokens + max(0, again),
                cached_tokens=before.cached_tokens if before.hit_reason else life.cached_tokens,
                common_tokens=before.common_tokens if before.hit_reason else life.common_tokens,
                pinned_tokens=before.pinned_tokens if before.hit_reason else life.pinned_tokens,
                hit_reason=before.hit_reason or life.hit_reason,
                hit_group=before.hit_group if before.hit_reason else life.hit_group,
            )
        self._life = replace(life, engine=self.replica.number, routing=self.choice.reason, resumed=self.resumed)
        return self._life


def error_of(delta: TextDelta) -> OctavoError:
    message = delta.error or "the engine failed"
    if delta.code in ("queue_timeout", "grammar_busy"):
        return UnavailableError(message, retry_after=1, code=delta.code)
    if delta.code == "grammar_error":
        return RequestError(message, "structured_outputs", delta.code)
    return EngineError(message, delta.code)


def merged(updates: Iterable[TextDelta]) -> list[TextDelta]:
    """Returns one delta per sample, in the order in which the samples began."""
    by_sample: dict[int, list[TextDelta]] = {}
    for delta in updates:
        by_sample.setdefault(delta.index, []).append(delta)
    return [parts[0] if len(parts) == 1 else _joined(parts) for parts in by_sample.values()]


def _joined(parts: list[TextDelta]) -> TextDelta:
    last = parts[-1]
    lives = [part.life for part in parts if part.life is not None]
    prompts = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
    joined = type(last)(
        request_id=last.request_id,
        index=last.index,
        text="".join([part.text for part in parts]),
        token_ids=[token for part in parts for token in part.token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        life=lives[-1] if lives else None,
        prompt_logprobs=prompts[0] if prompts else None,
        error=last.error,
        code=last.code,
    )
    if isinstance(joined, UnspelledDelta):
        joined.found = [found for part in parts if isinstance(part, UnspelledDelta) for found in part.found]
    return joined


class LoadBalancer:
    def __init__(self, streams: Mapping[str, Stream], engines: int, policy: Policy, caching: bool) -> None:
        """`streams`: the open requests, by id. `caching`: whether engines have a prefix cache."""
        self._streams = streams
        self._policy, self._num_engines = policy, engines
        self._by_prefix = caching and policy == "prefix"
        self._routing: Routing | None = None  # if there are several engines; made when the first one is ready
        self._digests = Digests(b"", b"")

    def meet(self, replica: Replica) -> None:
        """Registers an engine that is ready."""
        facts = replica.facts
        assert facts is not None
        self._digests = Digests(facts.digest_key, facts.identity)
        if self._num_engines > 1 and self._routing is None:
            self._routing = Routing(self._policy, self._num_engines, facts.limits.block_size)

    def choose(self, stream: Stream, replicas: Sequence[Replica], without: Collection[int]) -> Replica | None:
        """Returns the engine for a request, if one is ready. An engine that is to be replaced is chosen only if there is no other."""
        if self._routing is None:
            return None if without else replicas[0]
        allowed = [replica for replica in replicas if replica.number not in without and stream.engine in (None, replica.number)]
        there = [replica for replica in allowed if replica.is_there]
        ready = [replica.number for replica in there if replica.is_ready] or [replica.number for replica in there]
        if not ready:
            return None
        if self._by_prefix and not stream.blocks and stream.request.params.prompt_logprobs is None:
            stream.blocks = self._digests.of_prompt(stream.request, self._routing.block_size)
        stream.choice = self._routing.choose(stream.blocks, len(stream.request.prompt_token_ids), ready)
        return replicas[stream.choice.engine]

    def begin(self, stream: Stream, replica: Replica) -> None:
        """Records that the request was sent to the chosen engine."""
        request, stream.replica, stream.waits = stream.request, replica, False
        if self._routing is not None and stream.choice is not None:
            params = request.params
            most = (params.max_tokens or 1 << 30) * params.n
            self._routing.begin(request.request_id, stream.choice, stream.blocks, len(request.prompt_token_ids), most, params.n)

    def received(self, replica: Replica, deltas: list[Delta]) -> list[Delta]:
        """Returns the updates for requests that this engine has. Updates for requests that have moved on are dropped."""
        assert self._routing is not None
        current = []
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None or stream.replica is not replica:
                continue
            if delta.token_ids:
                stream.losses = 0
                self._routing.came(delta.request_id, len(delta.token_ids))
            if delta.life is not None:
                delta.life = stream.extended(delta.life)
            current.append(delta)
        return current

    def done(self, stream: Stream) -> None:
        """Records that no engine has the request any more."""
        stream.replica, stream.waits = None, False
        if self._routing is not None:
            self._routing.done(stream.request_id)

    def of(self, replica: Replica) -> list[Stream]:
        """Returns the requests that an engine has."""
        return [stream for stream in self._streams.values() if stream.replica is replica]

    def waiting(self) -> list[Stream]:
        """Returns the requests that wait for an engine."""
        return [stream for stream in self._streams.values() if stream.waits]

    def leave(self, replica: Replica) -> list[Stream]:
        """Returns the requests that an engine has lost. No engine has them now."""
        lost = self.of(replica)
        for stream in lost:
            stream.replica = None
        if self._routing is not None:
            self._routing.forget(replica.number)
        return lost

    def learn(self, replica: Replica, change: CacheChange) -> None:
        if self._routing is not None:
            self._routing.learn(replica.number, change)
