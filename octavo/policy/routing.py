"""`Routing`: selects the engine for a request.

    prefix    the engine that has most of the prompt, unless it is so busy that computing the prompt again elsewhere is faster
    least     the engine with the fewest tokens left to process
    turns     round robin
    first     the first that is ready, while the others are a reserve; for the lesson, which shows one engine

For each engine it tracks the cached blocks, which the engine reports, and the requests that this frontend has sent there. Blocks of a
request in flight count as cached, so requests with a common prefix that arrive together stay together. A load is the tokens that this
frontend has sent and that have not come back. Other frontends are not consulted: if each balances its own requests, the sum is
balanced.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from octavo.messages import CacheChange
from octavo.policy.digests import SHORT
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
    said: int = 0


@dataclass(slots=True)
class _Engine:
    found: set[bytes] = field(default_factory=set)  # cached blocks, as reported by the engine
    coming: dict[bytes, int] = field(default_factory=dict)  # block -> how many requests in flight there have it in their prompts
    load: int = 0  # tokens to compute and tokens to come
    turn: int = 0  # when it was last chosen


class Routing:
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
        sent.said += count
        left = max(1, sent.to_come - sent.said)  # it keeps some load until it ends
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
        if sent.said:
            self._guess += (sent.said / sent.samples - self._guess) / MEMORY

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
