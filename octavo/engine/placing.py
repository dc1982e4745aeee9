"""`Placing`: the load balancer of one API process. It knows which engine has which request, and chooses engines for new ones.
A `Trip` is the route of one request.

    choose ──► begin ──► heard, heard ... ──► done
                 ▲           │ its engine died
                 └── resume ─┘                  the tokens received so far go with it, as its output
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from octavo.engine.replica import Replica
from octavo.messages import AddRequest, CacheChange, Delta, LifeRecord
from octavo.policy.digests import Digests
from octavo.policy.routing import Choice, Policy, Routing


@dataclass(slots=True)
class Trip:
    request: AddRequest
    replica: Replica | None = None  # None: it waits for an engine
    choice: Choice | None = None  # why this engine; None if there is only one
    resumed: int = 0  # how often it continued in another engine
    blocks: list[bytes] = field(default_factory=list)  # short digests of its prompt, by which an engine is chosen
    full: set[int] = field(default_factory=set)  # engines that had no room for it
    engine: int | None = None  # the only engine that it may go to
    losses: int = 0  # engines lost in a row without a token in between
    begun: float = field(default_factory=time.monotonic)
    _life: LifeRecord | None = None  # the latest record
    _before: LifeRecord | None = None  # the record when it lost its engine

    def resume(self, said: dict[int, list[int]]) -> None:
        """Prepares the request to continue in another engine. `said`: the tokens so far of each sample that has not ended."""
        params = self.request.params
        is_fresh = len(said) == params.n and not any(said.values())
        self.request = replace(self.request, outputs=None if is_fresh else said)
        self.resumed += 1
        self.full.clear()  # a request that moves is never refused
        self._before = self._life or LifeRecord(self.begun)

    def told(self, life: LifeRecord) -> LifeRecord:
        """Returns an engine's record, extended by what happened in earlier engines and by the engine's number."""
        assert self.replica is not None and self.choice is not None
        before = self._before
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
                pinned_tokens=before.pinned_tokens if before.hit_reason else life.pinned_tokens,
                hit_reason=before.hit_reason or life.hit_reason,
                hit_group=before.hit_group if before.hit_reason else life.hit_group,
            )
        self._life = replace(life, engine=self.replica.number, routing=self.choice.reason, resumed=self.resumed)
        return self._life


class Placing:
    def __init__(self, engines: int, policy: Policy, caching: bool) -> None:
        """`caching`: whether engines have a prefix cache."""
        self._policy, self._num_engines = policy, engines
        self._by_prefix = caching and policy == "prefix"
        self._routing: Routing | None = None  # if there are several engines; made when the first one is ready
        self._digests = Digests(b"", b"")
        self._trips: dict[str, Trip] = {}

    def meet(self, replica: Replica) -> None:
        """Registers an engine that is ready."""
        facts = replica.facts
        assert facts is not None
        self._digests = Digests(facts.digest_key, facts.identity)
        if self._num_engines > 1 and self._routing is None:
            self._routing = Routing(self._policy, self._num_engines, facts.limits.block_size)

    def choose(self, trip: Trip, replicas: Sequence[Replica], without: Collection[int]) -> Replica | None:
        """Returns the engine for a request, if one is ready. An engine that is to be replaced is chosen only if there is no other."""
        if self._routing is None:
            return None if without else replicas[0]
        allowed = [replica for replica in replicas if replica.number not in without and trip.engine in (None, replica.number)]
        there = [replica for replica in allowed if replica.is_there]
        ready = [replica.number for replica in there if replica.is_ready] or [replica.number for replica in there]
        if not ready:
            return None
        if self._by_prefix and not trip.blocks and trip.request.params.prompt_logprobs is None:
            request = trip.request
            trip.blocks = self._digests.of_prompt(
                request.prompt_token_ids, request.cache_salt, self._routing.block_size, request.extras
            )
        trip.choice = self._routing.choose(trip.blocks, len(trip.request.prompt_token_ids), ready)
        return replicas[trip.choice.engine]

    def park(self, trip: Trip) -> None:
        """Lets the request wait, because no engine can be reached."""
        self._trips[trip.request.request_id] = trip

    def begin(self, trip: Trip, replica: Replica) -> None:
        """Records that the request was sent to the chosen engine."""
        request, trip.replica = trip.request, replica
        self._trips[request.request_id] = trip
        if self._routing is not None and trip.choice is not None:
            params = request.params
            most = (params.max_tokens or 1 << 30) * params.n
            self._routing.begin(request.request_id, trip.choice, trip.blocks, len(request.prompt_token_ids), most, params.n)

    def heard(self, replica: Replica, deltas: list[Delta]) -> list[Delta]:
        """Returns the updates for requests that this engine has. Updates for requests that have moved on are dropped."""
        assert self._routing is not None
        kept = []
        for delta in deltas:
            trip = self._trips.get(delta.request_id)
            if trip is None or trip.replica is not replica:
                continue
            if delta.token_ids:
                trip.losses = 0
                self._routing.came(delta.request_id, len(delta.token_ids))
            if delta.life is not None:
                delta.life = trip.told(delta.life)
            kept.append(delta)
        return kept

    def done(self, request_id: str) -> None:
        if self._trips.pop(request_id, None) is not None and self._routing is not None:
            self._routing.done(request_id)

    def refused(self, request_id: str) -> Trip:
        """Returns a request that the engine had no room for, and that no engine has now."""
        trip = self._trips[request_id]
        assert trip.replica is not None
        trip.full.add(trip.replica.number)
        trip.replica = None
        if self._routing is not None:
            self._routing.done(request_id)
        return trip

    def replica(self, request_id: str) -> Replica | None:
        """Returns the engine that has a request, if any."""
        trip = self._trips.get(request_id)
        return None if trip is None else trip.replica

    def of(self, replica: Replica) -> list[Trip]:
        """Returns the requests that an engine has."""
        return [trip for trip in self._trips.values() if trip.replica is replica]

    def waiting(self) -> list[Trip]:
        """Returns the requests that no engine has."""
        return [trip for trip in self._trips.values() if trip.replica is None]

    def leave(self, replica: Replica) -> list[Trip]:
        """Returns the requests that an engine has lost. No engine has them now."""
        trips = self.of(replica)
        for trip in trips:
            trip.replica = None
        if self._routing is not None:
            self._routing.forget(replica.number)
        return trips

    def learn(self, replica: Replica, change: CacheChange) -> None:
        if self._routing is not None:
            self._routing.learn(replica.number, change)
