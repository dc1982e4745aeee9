"""`Routing`: to which of several engines a request goes.

    prefix    to the engine that has most of the prompt, unless that has so much to do that computing it again elsewhere is quicker
    least     to the engine with the fewest tokens to do
    turns     to one after the other
    first     to the first that is ready, while the others are a reserve; for the lesson, which shows one engine

It knows of each engine which blocks can be found there, told by the engine, and what this door has sent there. Blocks of a request
that is on its way count as found, so requests with one prefix that come together stay together. A load is what this door has sent
and what has not come back. Other doors are not asked: if each balances its own requests, the sum is balanced.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from octavo.messages import CacheChange
from octavo.policy.digests import SHORT
from octavo.server_config import RoutingPolicy

Policy = RoutingPolicy | Literal["first"]
Reason = Literal["only", "prefix", "load", "spread", "turn"]
# only: no other engine is ready, or the others are a reserve. prefix: it has most of the prompt. load: it has the least to do, and no
# engine has much of the prompt. spread: another one has more of the prompt, but too much to do. turn: it was its turn.

WORTH = 4  # a prefix decides if it is at least one part in so many of the prompt
HOT, COLD = 2, 8  # a prefix is left if that saves so many times the tokens that are computed again
FIRST_GUESS = 256.0  # tokens of an answer, before any has ended
MEMORY = 16  # answers that the guess remembers, roughly


@dataclass(frozen=True, slots=True)
class Choice:
    engine: int
    reason: Reason
    cached_tokens: int  # of the prompt, that this engine will find as far as the door knows


@dataclass(slots=True)
class _Sent:
    """A request that an engine is at work on."""

    engine: int
    digests: Sequence[bytes]
    samples: int
    to_come: int  # tokens of its answers, guessed
    load: int  # what is left of them, and its prompt until the first one has come
    said: int = 0


@dataclass(slots=True)
class _Engine:
    found: set[bytes] = field(default_factory=set)  # blocks, as the engine tells them
    coming: dict[bytes, int] = field(default_factory=dict)  # block -> how many requests that are there have it in their prompts
    load: int = 0  # tokens to compute and to come
    turn: int = 0  # when it was last chosen


class Routing:
    def __init__(self, policy: Policy, num_engines: int, block_size: int) -> None:
        """`block_size`: the tokens that a digest stands for beyond the digest before it."""
        self.policy = policy
        self.block_size = block_size
        self._engines = [_Engine() for _ in range(num_engines)]
        self._sent: dict[str, _Sent] = {}
        self._turns = 0
        self._guess = FIRST_GUESS  # mean tokens of an answer

    # --- a choice ----------------------------------------------------------------------------------------------------

    def choose(self, digests: Sequence[bytes], num_prompt_tokens: int, ready: Collection[int]) -> Choice:
        """Returns where a request should go. `digests`: short ones, of the blocks of its prompt that are looked up."""
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

        If most of the prompt has to be computed wherever it goes, the load decides. Otherwise a few words that all prompts begin with
        would draw every prompt into the cache of one engine, while the others are empty.
        If the engine with the prefix has much more to do than another, that one computes the prefix again: then both have it. It is
        quicker as soon as the difference is larger than the tokens that are computed again. It is done at twice that if the prefix is
        hot: another request with it is at work there, so more will come, and they share the cost. If it is cold, as that of a
        conversation, nobody else needs the second copy, which takes time and the place of other blocks: then it must be eight times.
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
        """Order of engines. Among idle ones the emptiest cache comes first, then the one that was not chosen for longest."""
        state = self._engines[engine]
        return state.load, len(state.found), state.turn, engine

    def _cached(self, engine: int, digests: Sequence[bytes]) -> int:
        """Returns how many tokens of a prompt the engine has, or will have when this request is admitted there."""
        found, coming = self._engines[engine].found, self._engines[engine].coming
        count = 0
        for digest in digests:
            if digest not in found and digest not in coming:
                break
            count += 1
        return count * self.block_size

    # --- loads -------------------------------------------------------------------------------------------------------

    def load(self, engine: int) -> int:
        """Tokens that it has to compute, and that are still to come from it."""
        return self._engines[engine].load

    def begin(
        self, request_id: str, choice: Choice, digests: Sequence[bytes], num_prompt_tokens: int, most_to_come: int, samples: int = 1
    ) -> None:
        """A request goes to the engine that was chosen. `most_to_come`: the most tokens that all its samples may have together.

        Nobody knows how long an answer gets, and many clients ask for far more than they need. So the guess is the mean of the
        answers that have ended.
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
        """Tokens of its answer came. The first of them says that its prompt is computed."""
        sent = self._sent.get(request_id)
        if sent is None or not count:
            return
        sent.said += count
        left = max(1, sent.to_come - sent.said)  # it weighs something until it ends
        self._engines[sent.engine].load += left - sent.load
        sent.load = left

    def done(self, request_id: str) -> None:
        """It has ended, however. What the engine has kept of it, the engine has told."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return  # its engine was started again
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
        """Blocks that can be found there."""
        return len(self._engines[engine].found)

    def learn(self, engine: int, change: CacheChange) -> None:
        found = self._engines[engine].found
        if change.full:
            found.clear()
        found.update(_split(change.sealed))
        found.difference_update(_split(change.evicted))

    def forget(self, engine: int) -> None:
        """It was started again: its cache is empty, and the requests that were there have ended."""
        self._engines[engine] = _Engine()
        self._sent = {request_id: sent for request_id, sent in self._sent.items() if sent.engine != engine}


def _split(digests: bytes) -> list[bytes]:
    return [digests[start : start + SHORT] for start in range(0, len(digests), SHORT)]
