"""Where requests go: by prefix, by load and in turns; what a door believes of its engines is what is true of them."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.routing import POLICIES, Machine, Simulation, Way, of_trace, prefixes, third
from octavo.bench.traces import HASHED, read_trace
from octavo.engine import routing
from octavo.engine.routing import COLD, HOT, WORTH, CacheUpdates, Choice, Policy, Routing
from octavo.messages import AddRequest, CacheChange
from octavo.policy.cache_group import CacheGroup
from octavo.policy.prefix_matcher import SHORT, Digests
from octavo.server_config import RoutingPolicy
from tests.policy.machine_settings import machine_settings
from tests.support.fake import GROUPS, FakeEngine, sampling

SIZE = 16
ALL = range(3)


def digests(name: str, count: int, shared: int = 0) -> list[bytes]:
    """Digests of a prompt of `count` blocks. The first `shared` of them are the same for all names."""
    return [f"{'' if at < shared else name}{at}".encode().rjust(SHORT, b".") for at in range(count)]


def change(*sealed: bytes, evicted: list[bytes] | None = None, full: bool = False) -> CacheChange:
    return CacheChange(full, b"".join(sealed), b"".join(evicted or []))


@dataclass
class Door:
    """Sends requests whose prompts have one token more than their blocks."""

    routing: Routing
    number: int = 0
    names: list[str] = field(default_factory=list)

    def send(self, prompt: list[bytes], to_come: int = 1, ready: range = ALL) -> Choice:
        choice = self.routing.choose(prompt, len(prompt) * SIZE + 1, ready)
        self.number += 1
        self.names.append(str(self.number))
        self.routing.begin(str(self.number), choice, prompt, len(prompt) * SIZE + 1, to_come)
        return choice

    def end_all(self) -> None:
        for name in self.names:
            self.routing.done(name)
        self.names.clear()


def door(policy: Policy = "prefix", engines: int = 3) -> Door:
    return Door(Routing(policy, engines, SIZE))


# --- digests ---------------------------------------------------------------------------------------------------------


def to_hash(prompt: list[int], salt: str = "") -> AddRequest:
    return AddRequest("", prompt, sampling(1), cache_salt=salt)


@given(st.lists(st.integers(0, 49), min_size=1, max_size=40), st.sampled_from(["", "tenant", "a\0b"]))
@settings(max_examples=30, deadline=None)
def test_a_door_and_an_engine_compute_the_same_digests(prompt: list[int], salt: str) -> None:
    engine = FakeEngine(block_size=4)
    request = engine.add("a", prompt, sampling(1), salt=salt)
    (seq,) = request.sequences
    engine.kv.prefixes.match(seq)
    assert Digests(b"k" * 16, b"model").of_prompt(to_hash(prompt, salt), 4) == [digest[:SHORT] for digest in seq.digests]


def test_salts_identities_and_keys_stay_apart() -> None:
    prompt = list(range(33))
    made = [Digests(key, identity) for key in (b"k", b"l") for identity in (b"m", b"n")]
    chains = [digests.of_prompt(to_hash(prompt, salt), 16) for digests in made for salt in ("", "s")]
    assert {len(chain) for chain in chains} == {2}
    assert len({digest for chain in chains for digest in chain}) == 16


def test_a_digest_covers_what_lies_before_its_block() -> None:
    made = Digests(b"k", b"m")
    one, other = (made.of_prompt(to_hash([first] * 4 + [5] * 5), 4) for first in (1, 2))
    assert one[1] != other[1]


# --- choices ---------------------------------------------------------------------------------------------------------


def test_the_longest_prefix_wins_and_only_as_far_as_it_has_no_hole() -> None:
    routing, prompt = door().routing, digests("a", 10)
    routing.learn(0, change(*prompt[:3]))
    routing.learn(1, change(*prompt[:5]))
    routing.learn(2, change(*prompt[1:]))
    assert routing.choose(prompt, 161, ALL) == Choice(1, "prefix", 5 * SIZE)
    routing.learn(1, change(evicted=prompt[2:3]))
    assert routing.choose(prompt, 161, ALL) == Choice(0, "prefix", 3 * SIZE)


def test_with_a_reserve_the_first_that_is_ready_gets_everything() -> None:
    at = door("first")
    at.routing.learn(2, change(*digests("a", 10)))
    assert [at.send(digests("a", 10), 1000).engine for _ in range(3)] == [0, 0, 0]
    assert at.send(digests("a", 10), ready=range(1, 3)) == Choice(1, "only", 0), "the first is dead"
    assert at.send(digests("a", 10)).engine == 0


def test_of_two_with_the_same_prefix_the_one_with_less_to_do_gets_it() -> None:
    routing, prompt = door().routing, digests("a", 10)
    for engine in (0, 1):
        routing.learn(engine, change(*prompt))
    routing.begin("x", Choice(0, "prefix", 0), digests("b", 2), 33, 1)
    assert routing.choose(prompt, 161, ALL) == Choice(1, "prefix", 10 * SIZE)


def test_requests_with_one_prefix_that_come_together_stay_together() -> None:
    """Nothing was told by an engine yet."""
    at = door()
    first = at.send(digests("a", 100))
    assert first == Choice(0, "load", 0)
    assert [at.send(digests("a", 100)) for _ in range(3)] == [Choice(0, "prefix", 1600)] * 3
    assert at.send(digests("b", 100)).engine == 1


def test_what_was_expected_of_a_request_ends_with_it() -> None:
    at, prompt = door(), digests("a", 100)
    at.send(prompt)
    at.send(prompt)
    at.routing.done("1")
    assert at.routing.choose(prompt, 1601, ALL).cached_tokens == 1600, "the other one still makes them"
    at.end_all()
    assert at.routing.choose(prompt, 1601, ALL) == Choice(1, "load", 0)


def test_new_prefixes_are_dealt_over_idle_engines() -> None:
    """Also where all of them begin with the same few words. The emptiest cache gets the next."""
    at = door()
    homes = []
    for name in "abcdef":
        prompt = digests(name, 100, shared=2)
        homes.append(at.send(prompt).engine)
        at.routing.learn(homes[-1], change(*prompt))
        at.end_all()
    assert homes == [0, 1, 2, 0, 1, 2]


def test_of_idle_engines_the_emptiest_cache_gets_a_new_prefix() -> None:
    """Although it was the last to get one."""
    at = door()
    for engine, count in enumerate((20, 10, 30)):
        at.routing.learn(engine, change(*digests(f"x{engine}", count)))
    assert at.send(digests("a", 10)).engine == 1
    at.end_all()
    assert at.send(digests("b", 10)).engine == 1


def test_a_prefix_decides_if_it_is_a_good_part_of_the_prompt() -> None:
    routing, prompt = door().routing, digests("a", 100)
    routing.learn(2, change(*prompt[: 100 // WORTH]))
    assert routing.choose(prompt, 1600, ALL) == Choice(2, "prefix", 1600 // WORTH)
    assert routing.choose(prompt, 1601, ALL) == Choice(0, "load", 0)


def test_a_hot_prefix_spreads_and_then_both_engines_share_it() -> None:
    at, prompt = door(), digests("a", 100)
    at.routing.learn(0, change(*prompt))
    choices = [at.send(prompt, to_come=250) for _ in range(60)]
    first = next(number for number, choice in enumerate(choices) if choice.reason == "spread")
    assert {choice.reason for choice in choices[:first]} == {"prefix"} and {choice.engine for choice in choices[:first]} == {0}
    assert (first - 1) * 251 <= HOT * 1600 < first * 251, "as soon as the difference is twice what is computed again"
    assert Counter(choice.reason for choice in choices)["spread"] == 2, "each engine computes it once"
    loads = [at.routing.load(engine) for engine in ALL]
    assert max(loads) - min(loads) <= HOT * 1600 + 251


def test_a_cold_prefix_does_not_flutter() -> None:
    """Its engine is busier than the others for a while, and then again; each turn of a conversation finds the turns before it."""
    at, prompt = door(), digests("a", 100)
    at.routing.learn(1, change(*prompt))
    for number in range(30):
        for other in range(number % 6):
            at.routing.begin(f"{number} {other}", Choice(1, "load", 0), digests(f"{number} {other}", 100), 1601, 200)
        assert at.send(prompt, to_come=200) == Choice(1, "prefix", 1600)
        at.end_all()
        for other in range(number % 6):
            at.routing.done(f"{number} {other}")


def test_a_cold_prefix_stays_longer_than_a_hot_one() -> None:
    """Nobody else needs a second copy of it."""
    routing, prompt = door().routing, digests("a", 100)
    routing.learn(1, change(*prompt))
    routing.begin("other", Choice(1, "load", 0), [], COLD * 1600 - 1, 1)
    assert routing.load(1) == COLD * 1600
    assert routing.choose(prompt, 1601, ALL) == Choice(1, "prefix", 1600)
    routing.begin("more", Choice(1, "load", 1), [], 1, 1)
    assert routing.choose(prompt, 1601, ALL) == Choice(0, "spread", 0)


def test_the_policy_least_looks_at_tokens_and_not_at_requests() -> None:
    at = door("least", 2)
    assert at.send(digests("a", 100), ready=range(2)).engine == 0
    assert [at.send(digests(name, 10), ready=range(2)).engine for name in "bcdefg"] == [1] * 6
    assert at.routing.choose(digests("a", 100), 1601, range(2)) == Choice(1, "load", 0), "a prefix does not count"


def test_a_load_falls_with_the_first_token_and_with_every_other() -> None:
    at = door()
    at.send(digests("a", 100), to_come=20)
    assert at.routing.load(0) == 1601 + 20
    at.routing.came("1", 1)
    assert at.routing.load(0) == 19
    at.routing.came("1", 30)
    assert at.routing.load(0) == 1, "it is there until it ends"
    at.routing.done("1")
    assert at.routing.load(0) == 0


def test_an_answer_is_guessed_to_be_as_long_as_those_before_it() -> None:
    at = door()
    for _ in range(100):
        at.send([])
        at.routing.came(at.names[0], 40)
        at.end_all()
    engine = at.send([], to_come=1_000_000).engine
    assert at.routing.load(engine) == 1 + 40


def test_turns_go_around_those_that_are_ready() -> None:
    at = door("turns")
    assert [at.send([]).engine for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [at.send([], ready=range(2)).engine for _ in range(3)] == [0, 1, 0]
    assert at.send([]) == Choice(2, "turn", 0)


@pytest.mark.parametrize("policy", ["prefix", "least", "turns"])
def test_the_only_engine_that_is_ready_gets_everything(policy: RoutingPolicy) -> None:
    routing, prompt = door(policy).routing, digests("a", 10)
    routing.learn(2, change(*prompt[:4]))
    assert routing.choose(prompt, 161, [2]) == Choice(2, "only", 4 * SIZE)


def test_an_engine_that_was_started_again_has_nothing() -> None:
    at, prompt = door(), digests("a", 100)
    at.routing.learn(0, change(*prompt))
    at.send(prompt)
    at.routing.forget(0)
    assert (at.routing.load(0), at.routing.num_found(0)) == (0, 0)
    at.routing.came("1", 5)
    at.routing.done("1")
    assert at.routing.load(0) == 0, "its old requests mean nothing"
    assert at.routing.choose(prompt, 1601, ALL).cached_tokens == 0


# --- properties ------------------------------------------------------------------------------------------------------

PROMPTS = [digests(name, count, shared=2) for name in "abc" for count in (1, 4, 9)]


class RoutingMachine(RuleBasedStateMachine):
    """Beside a `Routing`: what each engine was told to have, and which requests are where."""

    def __init__(self) -> None:
        super().__init__()
        self.routing = Routing("prefix", 3, SIZE)
        self.found: list[set[bytes]] = [set() for _ in ALL]
        self.sent: dict[str, tuple[int, list[bytes], int]] = {}  # engine, prompt, the least load it can be
        self.number = 0

    @rule(engine=st.sampled_from(ALL), prompt=st.sampled_from(PROMPTS), cut=st.integers(0, 9), full=st.booleans())
    def seal(self, engine: int, prompt: list[bytes], cut: int, full: bool) -> None:
        self.routing.learn(engine, change(*prompt[:cut], full=full))
        self.found[engine] = (set() if full else self.found[engine]) | set(prompt[:cut])

    @rule(engine=st.sampled_from(ALL), prompt=st.sampled_from(PROMPTS), cut=st.integers(0, 9))
    def evict(self, engine: int, prompt: list[bytes], cut: int) -> None:
        self.routing.learn(engine, change(evicted=prompt[cut:]))
        self.found[engine] -= set(prompt[cut:])

    @rule(
        prompt=st.sampled_from(PROMPTS),
        more=st.integers(1, 200),
        to_come=st.integers(1, 500),
        ready=st.sets(st.sampled_from(ALL), min_size=1),
    )
    def send(self, prompt: list[bytes], more: int, to_come: int, ready: set[int]) -> None:
        length = len(prompt) * SIZE + more
        choice = self.routing.choose(prompt, length, ready)
        cached = {engine: self.has(engine, prompt) for engine in ready}
        load = {engine: self.routing.load(engine) for engine in ready}
        best, at = max(cached.values()), choice.engine
        assert choice.cached_tokens == cached[at]
        if choice.reason == "only":
            assert ready == {at}
        elif choice.reason == "load":
            assert load[at] == min(load.values()) and best * WORTH < length
        elif choice.reason == "prefix":
            assert cached[at] == best and best * WORTH >= length
        else:
            assert choice.reason == "spread" and cached[at] < best
            assert all(load[at] - cached[at] <= load[other] - cached[other] for other in ready), "it is the quickest"
        self.number += 1
        self.sent[str(self.number)] = at, prompt, length - choice.cached_tokens
        self.routing.begin(str(self.number), choice, prompt, length, to_come)

    def has(self, engine: int, prompt: list[bytes]) -> int:
        known = self.found[engine].union(*(digests for at, digests, _ in self.sent.values() if at == engine))
        return SIZE * next((count for count, digest in enumerate(prompt) if digest not in known), len(prompt))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), count=st.integers(0, 300))
    def come(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.sent)))
        engine, prompt, to_compute = self.sent[name]
        self.routing.came(name, count)
        self.sent[name] = engine, prompt, 0 if count else to_compute

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sent)))
        del self.sent[name]
        for _ in range(2):
            self.routing.done(name)

    @rule(engine=st.sampled_from(ALL))
    def start_again(self, engine: int) -> None:
        self.routing.forget(engine)
        self.found[engine] = set()
        self.sent = {name: sent for name, sent in self.sent.items() if sent[0] != engine}

    @invariant()
    def loads_are_of_those_that_are_there(self) -> None:
        for engine in ALL:
            there = [to_compute for at, _, to_compute in self.sent.values() if at == engine]
            assert self.routing.load(engine) >= sum(there) + len(there)
            assert there or self.routing.load(engine) == 0


TestRouting = RoutingMachine.TestCase
TestRouting.settings = machine_settings(examples=60, steps=30)


@given(st.sampled_from(GROUPS), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_what_a_door_believes_is_what_the_pools_hold(groups: tuple[CacheGroup, ...], seed: int) -> None:
    """Random schedules on small pools, with evictions and forgotten caches. A second door comes later, and is told in parts meanwhile."""
    random = Random(seed)
    engines = [FakeEngine(block_size=4, num_blocks=24, rows=4, groups=groups) for _ in ALL]
    news = [CacheUpdates(engine.pool) for engine in engines]
    early, late = Routing("prefix", 3, 4), Routing("prefix", 3, 4)
    doors = [early]
    for step in range(40):
        at = random.randrange(3)
        if random.random() < 0.6:
            length = random.randrange(1, min(30, engines[at].max_len - 8))
            engines[at].add(str(step), [random.randrange(2)] * length, sampling(random.randrange(1, 8)), salt=random.choice("ab"))
        if random.random() < 0.05:
            engines[at].pool.forget()
        for engine in engines:
            engine.step()
        if step == 20:
            for each in news:
                each.add("late")
            doors.append(late)
        with patch.object(routing, "MOST_BLOCKS", random.randrange(1, 8)):
            for number in ALL:
                if random.random() < 0.5 and (part := news[number].next_part()) is not None:
                    late.learn(number, part[1])
        if random.random() < 0.5:
            _tell(doors, news)
    for number in ALL:
        while news[number].is_behind:
            if (part := news[number].next_part()) is not None:
                late.learn(number, part[1])
            _tell(doors, news)
    for number, engine in enumerate(engines):
        held = {digest[:SHORT] for group, digest in engine.pool.index if group == 0}
        assert early._engines[number].found == late._engines[number].found == held


def _tell(doors: list[Routing], news: list[CacheUpdates]) -> None:
    for number in ALL:
        if (told := news[number].take()) is not None:
            for each in doors:
                each.learn(number, told)


# --- whole engines behind a door -------------------------------------------------------------------------------------


def test_eight_long_prefixes_over_three_engines_are_found_nearly_as_often_as_in_one() -> None:
    """Each cache holds a third of the prefixes. In turns, every prefix comes to every engine, and they evict each other."""
    asks = prefixes(8, 512, requests=240, gap_ms=40, own=16, to_come=8)
    machine = Machine(third(8, 512, 3), rows=8, budget=512)
    rates = {way: Simulation(way, 3, machine).run(asks).hit_rate for way in POLICIES}
    assert rates["prefix"] >= 0.95 * rates["one"] > 0.8
    assert max(rates["turns"], rates["least"]) < 0.8 * rates["prefix"]


TRACE = Path(__file__).parents[1] / "data/traces/mooncake_conversation.jsonl"


@pytest.mark.parametrize(("way", "found"), [("one", 5), ("turns", 3)])
def test_prompts_of_a_trace_share_what_they_shared_in_the_service(way: Way, found: int) -> None:
    """Its six requests come at once and have their first block in common. In turns, each engine gets two of them."""
    asks = of_trace(read_trace(str(TRACE)))
    figures = Simulation(way, 3, Machine(100, HASHED)).run(asks)
    assert figures.hits == found * HASHED and len(figures.first_ms) == 6
    assert figures.prompt_tokens == 6758 + 7322 + 7236 + 2290 + 6760 + 4834
