"""Abort in every state a sample can be in, at every step and at every point of a step: nothing leaks, nobody else notices."""

from collections.abc import Callable

import pytest

from octavo.policy.request import Sequence, Status
from tests.support.fake import FakeEngine, sampling
from tests.support.soaked import rarely

PREFIX = [(7 * i + 3) % 50 for i in range(9)]
REQUESTS = {"first": (PREFIX + [1], 1), "sampled": (PREFIX + [2] * 9, 2), "late": ([9] * 6, 1)}
STATES = {
    "queued", "awaits a prefix", "awaits its token", "preempted", "prefill, not forked", "at the fork", "prefill", "decode", "ended",
}  # fmt: skip


def _engine(depth: int) -> FakeEngine:
    """Three rows and a pool in which the requests preempt each other; prompts come in chunks."""
    engine = FakeEngine(block_size=2, num_blocks=18, rows=3, budget=5, depth=depth)
    for name, (prompt, n) in REQUESTS.items():
        engine.add(name, prompt, sampling(9, n))
    return engine


def _state(engine: FakeEngine, name: str) -> set[str]:
    request = engine.scheduler.requests.get(name)
    return {_state_of(seq, engine) for seq in request.sequences} if request else {"ended"}


def _state_of(seq: Sequence, engine: FakeEngine) -> str:
    if seq.status is Status.WAITING:
        if seq.waits_for in engine.kv.pending:
            return "awaits a prefix"
        if seq.in_flight:
            return "awaits its token"
        return "preempted" if seq.preemptions else "queued"
    if seq.unforked:
        return "at the fork" if seq.num_planned == seq.stop_at else "prefill, not forked"
    return "decode" if seq.num_planned >= seq.request.num_prompt else "prefill"


def _abort_at(depth: int, name: str, index: int | None, moment: int, point: str) -> set[str]:
    """A run in which `name` is aborted then and there; the states its samples were in."""
    engine, states = _engine(depth), set[str]()

    def abort() -> None:
        states.update(_state(engine, name))
        engine.abort(name, index)
        assert engine.abort(name, index) == [], "aborted twice"

    for _ in range(moment):
        engine.step()
    if point == "between steps":
        abort()
    else:
        hooks: list[Callable[[], None]] = getattr(engine.executor, point)
        hooks.append(abort)
    engine.run()
    engine.assert_exact({name})
    engine.assert_idle()
    return states


@pytest.mark.parametrize("depth", [*rarely(1), 2])
def test_abort_in_every_state_frees_everything_and_disturbs_nobody(depth: int) -> None:
    steps = _engine(depth).run()
    seen = set[str]()
    for name, (_, n) in REQUESTS.items():
        for moment in range(steps):
            for point in ("between steps", "before_forward", "after_forward"):
                seen |= _abort_at(depth, name, (moment % n if n > 1 and moment % 2 else None), moment, point)
    assert seen == STATES - ({"awaits its token"} if depth == 1 else set())


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_of_an_aborted_request_are_used_again_while_its_step_is_in_flight(depth: int) -> None:
    """Both plans run in order on one stream: what the old one still writes, the new one writes over before it reads."""
    engine = FakeEngine(block_size=2, num_blocks=8, rows=2, depth=depth)
    engine.add("old", PREFIX, sampling(4))
    engine.step()
    held = set(engine.scheduler.running[0].tables[0])
    engine.abort("old")
    engine.add("new", PREFIX[::-1], sampling(4))
    engine.step()
    taken = {block for _, _, _, block in engine.executor.plans[-1].new_blocks}
    assert len(engine.executor.plans) == 2 and len(engine.core._launched) == depth - 1
    assert len(taken & held) >= 3, "freed blocks are free at once"
    engine.run()
    engine.assert_exact({"old"})
    engine.assert_idle()
