"""Selects the engine for a request, by what engines report about their caches and by what was sent to them.

    Routing         in an API process: chooses among several engines
    CacheUpdates    in each engine: what is cached there, for the API processes

An engine and an API process compute the same digests, because they have the same key. One cache group is enough to tell which engine
has the longest prefix of a prompt, so only group 0 is sent.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from octavo.messages import CacheChange
from octavo.policy.block_pool import BlockKey, BlockPool, Event
from octavo.policy.prefix_matcher import SHORT
from octavo.server_config import RoutingPolicy

Policy = RoutingPolicy | Literal["first"]
Reason = Literal["only", "prefix", "load", "spread", "turn"]
# only: no other engine is ready, or the others are a reserve. prefix: it has most of the prompt. load: it has the least load, and no
# engine has much of the prompt. spread: another engine has more of the prompt, but too much load. turn: round robin.

WORTH = 4  # a prefix decides if it is at least this fraction of the prompt: one in 4
HOT, COLD = 2, 8  # the engine with a prefix is not used if avoiding it saves this many times the tokens that are computed again
FIRST_GUESS = 256.0  # tokens of an answer, before any answer has ended
MEMORY = 16  # roughly the number of answers over which the mean is taken


@dataclass(frozen=True, slots=True)
class Choice:
    engine: int
    reason: Reason
    cached_tokens: int  # of the prompt, on this engine, as far as the frontend knows


@dataclass(slots=True)
class _Sent:
    """A request that an engine is processing."""

    engine: int
    digests: Sequence[bytes]
    samples: int
    to_come: int  # estimated tokens of its answers
    load: int  # how many of them are left, and its prompt until the first one has arrived
    received: int = 0


@dataclass(slots=True)
class _Engine:
    found: set[bytes] = field(default_factory=set)  # cached blocks, as reported by the engine
    coming: dict[bytes, int] = field(default_factory=dict)  # block -> how many requests in flight there have it in their prompts
    load: int = 0  # tokens to compute and tokens to come
    turn: int = 0  # when it was last chosen


class Routing:
    """The policies:

        prefix    the engine that has most of the prompt, unless it is so busy that computing the prompt again elsewhere is faster
        least     the engine with the fewest tokens left to process
        turns     round robin
        first     the first that is ready, while the others are a reserve; for the lesson, which shows one engine

    For each engine it tracks the cached blocks, which the engine reports, and the requests that this process has sent there. Blocks of
    a request in flight count as cached, so requests with a common prefix that arrive together stay together. A load is the tokens that
    this process has sent and that have not come back. Other API processes are not consulted: if each balances its own requests, the
    sum is balanced.
    """

    def __init__(self, policy: Policy, num_engines: int, block_size: int) -> None:
        """`block_size`: the tokens that a digest covers beyond the previous digest."""
        self.policy = policy
        self.block_size = block_size
        self._engines = [_Engine() for _ in range(num_engines)]
        self._sent: dict[str, _Sent] = {}
        self._turns = 0
        self._guess = FIRST_GUESS  # mean tokens of an answer

    # --- a choice ----------------------------------------------------------------------------------------------------

    def choose(self, digests: Sequence[bytes], num_prompt_tokens: int, ready: Collection[int]) -> Choice:
        """Returns the engine for a request. `digests`: short ones, of the blocks of its prompt that are looked up."""
        assert ready, "no engine is ready"
        if len(ready) == 1 or self.policy == "first":
            engine = min(ready)
            return Choice(engine, "only", self._cached(engine, digests))
        if self.policy == "turns":
            engine = min(ready, key=lambda each: (self._engines[each].turn, each))
            return Choice(engine, "turn", self._cached(engine, digests))
        if self.policy == "least":
            engine = min(ready, key=self._by_load)
            return Choice(engine, "load", self._cached(engine, digests))
        return self._by_prefix(digests, num_prompt_tokens, {engine: self._cached(engine, digests) for engine in ready})

    def _by_prefix(self, digests: Sequence[bytes], num_prompt_tokens: int, cached: dict[int, int]) -> Choice:
        """The longest prefix decides, with two exceptions.

        If most of the prompt has to be computed on every engine, the load decides. Otherwise a few tokens that all prompts begin with would
        draw every prompt to one engine, while the others are idle.
        If the engine with the prefix has much more load than another, the other computes the prefix again, and then both have it. This is
        faster as soon as the difference in load is larger than the tokens computed again. The threshold is twice that for a hot prefix:
        another request with it is in progress there, so more will follow and share the cost. For a cold prefix, such as that of a
        conversation, no other request needs the second copy, which costs time and cache space: there the threshold is eight times.
        """
        least = min(cached, key=self._by_load)
        home = min(cached, key=lambda each: (-cached[each], self._by_load(each)))
        if cached[home] * WORTH < num_prompt_tokens:
            return Choice(least, "load", cached[least])
        quick = min(cached, key=lambda each: (self.load(each) - cached[each], self._by_load(each)))
        is_hot = digests[cached[home] // self.block_size - 1] in self._engines[home].coming
        if self.load(home) - self.load(quick) > (HOT if is_hot else COLD) * (cached[home] - cached[quick]):
            return Choice(quick, "spread", cached[quick])
        return Choice(home, "prefix", cached[home])

    def _by_load(self, engine: int) -> tuple[int, int, int, int]:
        """Sort key of engines. Among idle ones the emptiest cache comes first, then the least recently chosen."""
        state = self._engines[engine]
        return state.load, len(state.found), state.turn, engine

    def _cached(self, engine: int, digests: Sequence[bytes]) -> int:
        """Returns how many tokens of a prompt the engine has cached, or will have when this request is admitted there."""
        found, coming = self._engines[engine].found, self._engines[engine].coming
        count = 0
        for digest in digests:
            if digest not in found and digest not in coming:
                break
            count += 1
        return count * self.block_size

    # --- loads -------------------------------------------------------------------------------------------------------

    def load(self, engine: int) -> int:
        """The tokens that the engine has to compute or generate."""
        return self._engines[engine].load

    def begin(
        self, request_id: str, choice: Choice, digests: Sequence[bytes], num_prompt_tokens: int, most_to_come: int, samples: int = 1
    ) -> None:
        """Records that a request was sent to the chosen engine. `most_to_come`: the token limit of all its samples together.

        The length of an answer is unknown, and many clients request far more than they need. So it is estimated as the mean of the answers
        that have ended.
        """
        assert request_id not in self._sent
        to_come = max(1, min(most_to_come, round(self._guess * samples)))
        sent = _Sent(choice.engine, digests, samples, to_come, num_prompt_tokens - choice.cached_tokens + to_come)
        engine = self._engines[choice.engine]
        self._turns += 1
        self._sent[request_id], engine.turn = sent, self._turns
        engine.load += sent.load
        for digest in digests:
            engine.coming[digest] = engine.coming.get(digest, 0) + 1

    def came(self, request_id: str, count: int) -> None:
        """Records received tokens of an answer. The first of them means that the prompt is computed."""
        sent = self._sent.get(request_id)
        if sent is None or not count:
            return
        sent.received += count
        left = max(1, sent.to_come - sent.received)  # it keeps some load until it ends
        self._engines[sent.engine].load += left - sent.load
        sent.load = left

    def done(self, request_id: str) -> None:
        """Removes a request that has ended, for any reason. The engine itself reports which blocks it has cached."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return  # its engine was restarted
        engine = self._engines[sent.engine]
        engine.load -= sent.load
        for digest in sent.digests:
            if engine.coming[digest] == 1:
                del engine.coming[digest]
            else:
                engine.coming[digest] -= 1
        if sent.received:
            self._guess += (sent.received / sent.samples - self._guess) / MEMORY

    # --- what an engine has ------------------------------------------------------------------------------------------

    def num_found(self, engine: int) -> int:
        """The number of blocks cached there."""
        return len(self._engines[engine].found)

    def learn(self, engine: int, change: CacheChange) -> None:
        found = self._engines[engine].found
        if change.full:
            found.clear()
        found.update(_split(change.sealed))
        found.difference_update(_split(change.evicted))

    def forget(self, engine: int) -> None:
        """Resets a restarted engine: its cache is empty, and its requests have ended."""
        self._engines[engine] = _Engine()
        self._sent = {request_id: sent for request_id, sent in self._sent.items() if sent.engine != engine}


def _split(digests: bytes) -> list[bytes]:
    return [digests[start : start + SHORT] for start in range(0, len(digests), SHORT)]


# -- what an engine reports

GROUP = 0  # the cache group that is sent
MOST_BLOCKS = 8192  # of which a part tells, about a millisecond of work
MOST_DIGESTS = 4096  # sealed, and as many evicted, in one take


class CacheUpdates:
    """Changes since the last `take` for all API processes, and all that is cached, a part at a time, for a new one (`add`, `next_part`).

    A pool can have a million blocks. So what the loop of the engine sends in one turn is limited, and the rest follows in the next
    turns. Parts go over the blocks in order, while they change. A reader with all parts and all changes since the first part knows
    exactly what is cached: a digest that moves to a block that was passed already is sealed there, and whatever happens to a digest
    last is a change.

    Used only by the engine's loop, since the pool changes in every step.

    It stays hooked into the pool, so it must be created before the first watcher: a watcher that leaves restores the hook it found.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._on_event = pool.on_event
        self._sealed: dict[bytes, None] = dict.fromkeys(digest for group, digest in pool.index if group == GROUP)  # not sent yet
        self._evicted: dict[bytes, None] = {}
        self._new: dict[str, int] = {}  # frontends that have not got all parts, and the first block of the next one
        pool.on_event = self._on_block

    def _on_block(self, event: Event, block: int, key: BlockKey | None) -> None:
        self._on_event(event, block, key)
        if key is None or event == "share" or key[0] != GROUP:
            return  # most events have no key; only seal, evict and share have one
        now, before = (self._sealed, self._evicted) if event == "seal" else (self._evicted, self._sealed)
        before.pop(key[1], None)
        now[key[1]] = None

    @property
    def is_behind(self) -> bool:
        """Whether there is more to send."""
        return bool(self._sealed or self._evicted or self._new)

    def add(self, name: str) -> None:
        """A frontend is new, or has forgotten everything."""
        self._new.pop(name, None)
        self._new[name] = 0

    def drop(self, name: str) -> None:
        """A frontend has left."""
        self._new.pop(name, None)

    def next_part(self) -> tuple[str, CacheChange] | None:
        """Returns a frontend that is new, and the next part of what is cached; None if there is no such frontend, or nothing in this part.

        The first part is `full`: it replaces what came before.
        """
        if not self._new:
            return None
        name, start = next(iter(self._new.items()))
        self._new[name] = end = start + MOST_BLOCKS
        if end >= self._pool.num_blocks:
            del self._new[name]
        found = [key[1] for key in self._pool.key_of[start:end] if key is not None and key[0] == GROUP]
        return (name, CacheChange(start == 0, _joined(found))) if found or start == 0 else None

    def take(self) -> CacheChange | None:
        """Returns changes since the last take, oldest first, or None."""
        if not (self._sealed or self._evicted):
            return None
        return CacheChange(False, _joined(_taken(self._sealed)), _joined(_taken(self._evicted)))


def _taken(digests: dict[bytes, None]) -> list[bytes]:
    """Removes the first digests, and returns them."""
    taken = list(islice(digests, MOST_DIGESTS))
    for digest in taken:
        del digests[digest]
    return taken


def _joined(digests: Iterable[bytes]) -> bytes:
    return b"".join([digest[:SHORT] for digest in digests])
