"""Drafts never change a text: FakeKV writes the slots of rejected ones, and a slot that is read later shows in the text.

`tests/policy/test_engine_machine.py` and the storms have drafts, too, with everything else that can happen.
"""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import StepPlan
from octavo.policy.cache_group import FULL, CacheGroup
from octavo.sampling_params import SamplingParams
from tests.support.fake import GROUPS, FakeEngine, sampling

PROMPT = [(11 * i + i * i // 5) % 50 for i in range(13)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
MOST = 4


def _engine(depth: int, rows: int = 16, **more: object) -> FakeEngine:
    return FakeEngine(**{"block_size": 4, "rows": rows, "budget": 40, "depth": depth, "drafts": MOST, **more})  # type: ignore[arg-type]


def _drafts(plans: list[StepPlan]) -> int:
    return sum(len(drafts) for plan in plans for drafts in plan.drafts.values())


@settings(max_examples=40)
@given(
    size=st.sampled_from([1, 2, 4, 16]), groups=st.sampled_from(GROUPS), depth=st.integers(1, 2), stages=st.sampled_from([1, 1, 2]),
    num_blocks=st.integers(10, 30), preempt_every=st.sampled_from([0, 3]), end_ids=st.sampled_from([(), tuple(range(0, 50, 9))]),
    budget=st.sampled_from([16, 40]),
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 30), st.integers(0, 12)), min_size=1, max_size=5),
)  # fmt: skip
def test_texts_and_logprobs_are_those_without_drafts(
    size: int, groups: tuple[CacheGroup, ...], depth: int, stages: int, budget: int, num_blocks: int, preempt_every: int,
    end_ids: tuple[int, ...], requests: list[tuple[int, int, int, int]],
) -> None:  # fmt: skip
    """Whatever is accepted: samples, hits, preemptions, ends and minimum lengths within accepted drafts, bad words."""
    answers = []
    for drafts in (0, MOST):
        engine = FakeEngine(
            block_size=size, num_blocks=num_blocks * 16 // size, rows=16, budget=budget, depth=depth, stages=stages, drafts=drafts,
            preempt_every=preempt_every, end_ids=end_ids, groups=groups if stages == 1 else (FULL,), max_len=60,
        )  # fmt: skip
        for number, (cut, n, count, least) in enumerate(requests):
            params = SamplingParams(max_tokens=count, n=n, min_tokens=min(least, count), logprobs=2, seed=number % 2 or None)
            engine.add(str(number), PROMPT[cut:], params, bad_words=[[number], [7, 8]] if number % 2 else None)
        found: dict[tuple[str, int], list[object]] = {}
        while engine.core.has_work:
            for delta in engine.step():
                found.setdefault((delta.request_id, delta.index), []).extend(delta.logprobs or ())
        engine.assert_exact()
        engine.assert_idle()
        assert all(len(found.get(key, [])) == len(tokens) for key, tokens in engine.tokens.items())
        answers.append(found)
    assert answers[0] == answers[1]


@DEPTHS
def test_accepted_drafts_save_steps_and_rejected_ones_do_not_count_as_tokens(depth: int) -> None:
    counts = []
    for drafts in (0, MOST):
        engine = _engine(depth, drafts=drafts)
        for number in range(6):
            engine.add(str(number), PROMPT[number:], sampling(20 + number))
        counts.append(engine.run())
        engine.assert_exact()
        stats, plans = engine.scheduler.stats, engine.executor.plans
        assert stats.generation_tokens == sum(map(len, engine.tokens.values()))
        assert stats.prompt_tokens == sum(len(PROMPT) - number for number in range(6)) - stats.prefix_hits
        assert bool(drafts) == (_drafts(plans) > 0)
        assert max(sum(max(1, count) for count in plan.outputs) for plan in plans) <= 16, "more outputs than rows"
    assert counts[1] < counts[0] * depth * 3 / 4  # at depth 2, a sequence is in every other step


@pytest.mark.parametrize(("rows", "num_blocks"), [(5, 64), (16, 16)], ids=["no row is free", "few blocks are free"])
def test_drafts_displace_nothing(rows: int, num_blocks: int) -> None:
    """They take only outputs and blocks that nobody needs: no more sequences are preempted than without them."""
    preempted = []
    for drafts in (0, MOST):
        engine = _engine(1, rows, num_blocks=num_blocks, drafts=drafts, caching=False)
        for number in range(5):
            engine.add(str(number), PROMPT[:4], sampling(6))
        engine.run()
        engine.assert_exact()
        preempted.append(engine.scheduler.stats.preemptions)
    assert preempted == [0, 0]
    assert (_drafts(engine.executor.plans) == 0) == (rows == 5)


def test_decode_is_not_starved_by_a_prefill_while_drafts_are_computed() -> None:
    engine = _engine(1, 8, budget=12, num_blocks=200)
    engine.add("long", [at % 50 for at in range(400)], sampling(1))
    engine.step()
    engine.add("decodes", PROMPT, sampling(20))
    engine.run()
    engine.assert_exact()
    steps = sorted(set(engine.token_steps["decodes", 0]))
    assert all(after - before == 1 for before, after in pairwise(steps)), "it got tokens in every step"
    assert max(sum(plan.num_query) for plan in engine.executor.plans) <= 12
