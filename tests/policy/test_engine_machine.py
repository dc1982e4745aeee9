"""The whole engine on FakeKV under anything a user, a full pool or a fault can do, at any point of a step.

Every finished text must be exact, every sample must end once with one reason, and idle must equal the start; `FakeEngine`
checks the invariants inside every step, `check` after every rule.
"""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from octavo.errors import RequestError
from octavo.messages import Beams, StepPlan
from octavo.policy import invariants
from octavo.policy.cache_group import FULL, CacheGroup
from octavo.policy.request import Sequence
from octavo.sampling_params import SamplingParams
from tests.policy.machine_settings import SOAK, machine_settings
from tests.support.fake import GROUPS, VOCAB, FakeEngine

BASE = [(7 * i + i * i // 3) % VOCAB for i in range(80)]  # what prompts have in common
MOST_TOKENS = 80

anyone = st.tuples(st.integers(0, 99), st.none() | st.integers(0, 3))  # a request (perhaps ended or unknown), a sample or all
points = st.sampled_from(["before_forward", "after_forward"])
searches = st.builds(Beams, st.integers(1, 4), st.sampled_from([0.0, 0.7, 1.0, 2.0]), st.sampled_from([False, True, "never"]))
changes = st.sampled_from(["fork", "truncate", "replace", "exchange"])


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        num_blocks=st.integers(4, 24),
        rows=st.integers(1, 6),
        spare=st.sampled_from([0, 1, 5, 40]),
        depth=st.sampled_from([1, 2]),
        caching=st.sampled_from([True, True, True, False]),
        by_priority=st.booleans(),
        preempt_every=st.sampled_from([0, 0, 0, 3, 7]),
        end_ids=st.sampled_from([(), (3,), (1, 2, 3, 4)]),
        groups=st.sampled_from(GROUPS),
        drafts=st.sampled_from([0, 0, 1, 4]),
        stages=st.sampled_from([1, 1, 2, 3]),
        shorter=st.sampled_from([1, 1, 2, 4]),
        links=st.sampled_from([None, 1, 3]),
        states=st.sampled_from([None, None, 0, 1, 4]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        rows: int,
        spare: int,
        depth: int,
        caching: bool,
        by_priority: bool,
        preempt_every: int,
        end_ids: tuple[int, ...],
        groups: tuple[CacheGroup, ...],
        drafts: int,
        stages: int,
        shorter: int,
        links: int | None,
        states: int | None,
    ) -> None:
        """`shorter`: where requests cannot fill the pool, there is room for pins."""
        self.engine = FakeEngine(
            block_size=block_size,
            num_blocks=num_blocks,
            rows=rows,
            budget=rows + spare,
            most_len=max(2, min(MOST_TOKENS, num_blocks * block_size // shorter)),
            depth=depth if stages == 1 else 1,
            caching=caching,
            by_priority=by_priority,
            preempt_every=preempt_every,
            end_ids=end_ids,
            groups=groups if stages == 1 else (FULL,),  # a pipeline has no windows that give back
            drafts=drafts if states is None else 0,
            stages=stages,
            links=links,
            states=states,
        )
        self.rows = rows
        self.pins: dict[str, tuple[int, str]] = {}  # length and salt
        self.disturbed: set[str] = set()  # ended early on purpose, or in reach of a fault

    @rule(
        shared=st.integers(0, 70),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        n=st.integers(1, 4),
        count=st.none() | st.integers(1, 24),
        seed=st.none() | st.integers(0, 2),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), (), (9,)]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "", "other"]),
        position_offset=st.sampled_from([0, 0, 5]),
        unwanted=st.sampled_from([None, None, 0, 1]),
        beams=st.none() | searches,
    )
    def add(
        self,
        shared: int,
        tail: list[int],
        n: int,
        count: int | None,
        seed: int | None,
        ignore_eos: bool,
        stop: tuple[int, ...],
        priority: int,
        salt: str,
        position_offset: int,
        unwanted: int | None,
        beams: Beams | None,
    ) -> None:
        engine = self.engine
        longest = max(2, engine.max_len - position_offset)
        prompt = (BASE[:shared] + tail or [0])[: longest - 1]
        if count is not None:
            count = min(count, longest - len(prompt))
        position_offset = min(position_offset, engine.max_len - longest)
        most = self.rows if beams is None else beams.width
        params = SamplingParams(n=min(n, most), max_tokens=count, seed=seed, ignore_eos=ignore_eos, stop_token_ids=stop)
        try:
            engine.add(f"r{len(engine.asked)}", prompt, params, priority, salt, beams=beams, position_offset=position_offset)
        except RequestError:
            assert beams is not None, "refused, but it fits"
            return
        if unwanted is not None:
            self._abort((1, unwanted))  # one sample of the newest, before it could be forked

    def _abort(self, whom: tuple[int, int | None]) -> None:
        number, index = whom
        name = f"r{len(self.engine.asked) - number % (len(self.engine.asked) + 1)}"
        decided = {(delta.request_id, delta.index) for delta in self.engine.core._updates if delta.finish_reason is not None}
        ended = decided | self.engine.ends.keys()  # the end of an unpinned request is returned by the next step
        live = {index for at, index in self.engine.tokens if at == name and (name, index) not in ended}
        deltas = self.engine.abort(name, index)
        is_search = name in self.engine.asked and self.engine.asked[name][0].beams is not None
        assert {delta.index for delta in deltas} == (live if index is None or is_search else live & {index})
        assert all(delta.finish_reason == "abort" for delta in deltas)
        self.disturbed.add(name)
        assert self.engine.abort(name, index) == [], "aborted twice"

    @rule(whom=anyone)
    def abort(self, whom: tuple[int, int | None]) -> None:
        self._abort(whom)

    @rule(length=st.integers(1, 60), seconds=st.none() | st.integers(1, 40), salt=st.sampled_from(["", "", "other"]), again=st.booleans())
    def pin(self, length: int, seconds: int | None, salt: str, again: bool) -> None:
        """A prefix is computed to be held, perhaps one that somebody computes or that is held already."""
        engine, number = self.engine, len(self.engine.asked)
        name = f"pin{number}"
        if again and self.pins:
            name, (length, salt) = list(self.pins.items())[-1]
        try:
            engine.pin(name, BASE[:length][: engine.max_len - 1], seconds, salt, request=f"r{number}")
        except RequestError:
            return
        self.pins[name] = length, salt

    def _unpin(self, pick: int) -> None:
        if self.pins:
            name = list(self.pins)[pick % len(self.pins)]
            requests = self.engine.scheduler.requests.values()
            self.disturbed |= {request.request_id for request in requests if request.pin is not None and request.pin.pin_id == name}
            self.engine.unpin(name)
            assert name not in self.engine.scheduler.pins

    @rule(pick=st.integers(0, 9), point=st.none() | points)
    def unpin(self, pick: int, point: str | None) -> None:
        hooks = self.engine.executor.before_forward if point == "before_forward" else self.engine.executor.after_forward
        if point is None:
            self._unpin(pick)
        else:
            hooks.append(lambda: self._unpin(pick))
            self.engine.step()

    @rule()
    def expire_pins(self) -> None:
        pins = self.engine.scheduler.pins
        pins.expire()
        assert pins.seconds_left() != 0.0

    @rule(pick=st.integers(0, 9))
    def begin_again(self, pick: int) -> None:
        """One goes on as in another engine, with all that its client has: the tokens in flight come once more."""
        if live := [name for name, request in self.engine.scheduler.requests.items() if request.pin is None]:
            self.engine.begin_again(live[pick % len(live)])

    @rule(steps=st.integers(1, 12))
    def expire(self, steps: int) -> None:
        requests, now = self.engine.scheduler.requests.values(), self.engine.scheduler.step
        queued = [request for request in requests if request.life.first_scheduled is None and request.arrival >= 0]
        late = {request.request_id for request in queued if now - request.life.queued >= steps}
        self.disturbed |= late
        assert {delta.request_id for delta in self.engine.expire(steps)} == late

    def _sample(self, pick: int) -> Sequence | None:
        """A sample that has begun to answer."""
        scheduler = self.engine.scheduler
        live = [seq for seq in scheduler.running + scheduler.waiting if seq.request.beams is None]
        begun = [seq for seq in live if seq.num_tokens > seq.request.num_prompt]
        return begun[pick % len(begun)] if begun else None

    def _change(self, what: str, pick: int, number: int) -> None:
        seq, engine = self._sample(pick), self.engine
        if seq is None:
            return
        if what == "fork":
            engine.fork(seq)
        elif what == "truncate" and engine.kv.shortest(seq) <= seq.num_tokens:
            engine.truncate(seq, max(seq.request.num_prompt, engine.kv.shortest(seq), seq.num_tokens - number))
        elif what == "replace" and not seq.in_flight and seq.num_planned < seq.num_tokens:
            token = next(token for token in range(number, VOCAB) if token not in seq.request.end_ids)
            engine.replace_last(seq, token)
        elif what == "exchange" and len(engine.scheduler.running) > 1:
            one, other, *_ = engine.scheduler.running[number % 2 :] + engine.scheduler.running
            engine.scheduler.rows.exchange(one, other)

    @rule(what=changes, pick=st.integers(0, 9), number=st.integers(0, 9))
    def change(self, what: str, pick: int, number: int) -> None:
        self._change(what, pick, number)

    @rule(what=changes, pick=st.integers(0, 9), number=st.integers(0, 9), point=points)
    def step_with_change_inside(self, what: str, pick: int, number: int, point: str) -> None:
        hooks = self.engine.executor.before_forward if point == "before_forward" else self.engine.executor.after_forward
        hooks.append(lambda: self._change(what, pick, number))
        self.engine.step()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(whom=anyone, point=points)
    def step_with_abort_inside(self, whom: tuple[int, int | None], point: str) -> None:
        hooks = self.engine.executor.before_forward if point == "before_forward" else self.engine.executor.after_forward
        hooks.append(lambda: self._abort(whom))
        self.engine.step()

    @rule(point=points)
    def step_with_reset_inside(self, point: str) -> None:
        hooks = self.engine.executor.before_forward if point == "before_forward" else self.engine.executor.after_forward
        hooks.append(self.engine.kv.forget)
        self.engine.step()

    @rule()
    def preempt(self) -> None:
        self.engine.preempt_last()
        self.engine.step()

    @rule(entries=st.sets(st.integers(0, 5), min_size=1, max_size=2))
    def step_with_nan_rows(self, entries: set[int]) -> None:
        self.engine.faults.poison = entries
        self._faulty_step(lambda plan: {seq_id for at, seq_id in enumerate(plan.seq_id) if at in entries})

    @rule(entry=st.integers(-1, 3))
    def step_with_failing_forward(self, entry: int) -> None:
        self.engine.faults.raise_at = entry
        self._faulty_step(self.engine.touched)

    def _faulty_step(self, hurt: Callable[[StepPlan], set[int]]) -> None:
        """A step with a fault that may end the requests of the sequences `hurt` names, and no others."""
        engine = self.engine

        def note_owners() -> None:
            plans = [plan for plan in engine.executor.plans[-1:] if plan.step == engine.scheduler.step]  # none if it was empty
            sequences = {seq_id for plan in plans for seq_id in hurt(plan)}
            requests = engine.scheduler.requests.values()
            self.disturbed |= {request.request_id for request in requests for seq in request.sequences if seq.seq_id in sequences}

        engine.executor.before_forward.append(note_owners)
        engine.step()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            invariants.check(self.engine.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.scheduler.preempt_every = 0  # it slows down what is left, and that can be much
        self.engine.run(most_steps=50_000)
        for pin in self.pins:
            self.engine.unpin(pin)
        self.engine.assert_idle()
        assert set(self.engine.ends) == set(self.engine.tokens), "somebody never ended"
        self.engine.assert_exact(self.disturbed)


def test_engine_survives_anything_with_exact_texts() -> None:
    run_state_machine_as_test(EngineMachine, settings=machine_settings(150, 30))


@pytest.mark.soak
def test_engine_survives_anything_with_exact_texts_for_long() -> None:
    run_state_machine_as_test(EngineMachine, settings=machine_settings(500, 100, SOAK))
