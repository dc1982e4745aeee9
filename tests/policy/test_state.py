"""A state of each sequence, computed from all of its tokens: it is copied by a fork, and computed again after a preemption."""

from dataclasses import replace

import pytest

from octavo.config import Debug, EngineConfig
from octavo.engine.build import Started, assemble
from octavo.errors import EngineError
from octavo.messages import RowFork, StepPlan
from octavo.models.registry import read_config
from octavo.policy.cache_spec import CacheGeometry
from octavo.sizing.auto import resolved
from octavo.worker.fake_runner import FakeRunner
from octavo.worker.faults import Faults
from tests.loading.test_sharded import raw_config
from tests.support.fake import GROUPS, FakeEngine, sampling

PROMPT = [(7 * i + i * i // 3) % 50 for i in range(29)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def busy(depth: int, preempt_every: int, groups: int = 0) -> FakeEngine:
    """Samples that fork after a prompt computed in chunks, and rows that others have had before."""
    engine = FakeEngine(
        block_size=4, num_blocks=90, rows=5, budget=9, depth=depth, preempt_every=preempt_every, groups=GROUPS[groups],
        caching=False, state_bytes=8,
    )  # fmt: skip
    for number in range(6):
        engine.add(str(number), PROMPT[: 5 + 4 * number], sampling(12, n=1 + number % 3, seed=number))
    return engine


@DEPTHS
@pytest.mark.parametrize("preempt_every", [0, 3])
def test_forks_copy_a_state_and_a_preempted_sequence_computes_it_again(depth: int, preempt_every: int) -> None:
    for groups in (0, 2):
        engine = busy(depth, preempt_every, groups)
        engine.run()
        engine.assert_exact()
        engine.assert_idle()
        assert any(plan.row_forks for plan in engine.executor.plans) and (engine.scheduler.stats.preemptions > 0) == (preempt_every > 0)


@DEPTHS
@pytest.mark.parametrize("lost", ["at a fork", "at a preemption"])
def test_a_state_that_is_lost_or_kept_too_long_changes_the_text(lost: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = FakeRunner._apply_rows

    def forgetful(runner: FakeRunner, plan: StepPlan) -> None:
        before = {number: row.state for number, row in runner.rows.items()}
        apply(runner, plan)
        changed: list[RowFork] | list[int] = plan.row_forks if lost == "at a fork" else []
        for fork in changed:
            runner.rows[fork.row].state = before.get(fork.row, 7)
        for write in plan.row_writes if lost == "at a preemption" else []:
            runner.rows[write.row].state = before.get(write.row, runner.rows[write.row].state)

    monkeypatch.setattr(FakeRunner, "_apply_rows", forgetful)
    engine = busy(depth, 3)
    engine.check = False  # a block may be sealed with what is wrong
    with pytest.raises((AssertionError, EngineError)):
        engine.run()
        engine.assert_exact()


def test_prefix_hits_are_off_because_blocks_do_not_hold_the_state_after_their_tokens() -> None:
    model = read_config(raw_config("Llama"), "test")
    config = resolved(EngineConfig(enable_prefix_caching=True, max_num_seqs=4), "cpu")
    for state_bytes in (0, 8):
        geometry = CacheGeometry(20, 4, 64, 1, state_bytes=state_bytes)
        runner = FakeRunner(geometry, model.vocab_size, Faults(Debug()))
        core = assemble(Started(replace(config), runner, geometry, identity=b"fake", key=b"k" * 16), model, Debug())
        assert core.scheduler.kv.caching == (state_bytes == 0)
        core.close()
