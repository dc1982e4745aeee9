"""Rows that ask for more than a step does: who they are, what stays of them, and the logprobs of prompts."""

import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.sampling_params import SamplingParams
from octavo.worker import model_runner
from octavo.worker.model_runner import PromptLogprobs
from tests.support.sampled import Rows

VOCAB, ROWS = 24, 6
KEY = NoiseKey((1, 2), 3, 4)


def write(row: int, params: SamplingParams, ids: list[int] | None = None, num_prompt: int = 1) -> RowWrite:
    return RowWrite(row, row, array("i", ids or [1, 2]), num_prompt, 0, [[]], params, (1,), [], KEY, b"")


def test_a_row_that_is_not_finite_stays_marked() -> None:
    rows = Rows(ROWS, VOCAB)
    rows.apply(StepPlan(0, row_writes=[write(0, SamplingParams(top_k=3, logprobs=1))]))
    ids, plan = torch.tensor([-1], dtype=torch.int32), StepPlan(1, row=[0], start=[1], num_query=[1], outputs=[1])
    found = rows.sampler.sample(torch.full((1, VOCAB), torch.nan), plan, ids, {})
    assert ids.tolist() == [-1] and list(found.logprobs()) == [0]


def test_nothing_is_special_where_nobody_asks_for_more() -> None:
    rows, plan = Rows(ROWS, VOCAB), StepPlan(0, row=[0, 1], outputs=[1, 1])
    plain = [SamplingParams(), SamplingParams(temperature=0, top_k=7, top_p=0.5)]  # filters cannot change the best one
    plan.row_writes = [write(row, params) for row, params in enumerate(plain)]
    rows.apply(plan)
    assert rows.sampler.special(plan) == []
    rows.apply(StepPlan(1, row_writes=[write(1, SamplingParams(logprobs=0))]))
    assert rows.sampler.special(plan) == [1]
    assert rows.sampler.special(StepPlan(2, row=[1, 0], outputs=[0, 1])) == []
    rows.apply(StepPlan(3, row_writes=[replace(plan.row_writes[0], row=1)]))
    assert rows.sampler.special(plan) == [], "the next tenant asks for nothing"


# promise: logprobs-mode-gpu, gpu-computes-device
@pytest.mark.parametrize("at_once", [1, 3, 2**24])
def test_a_fork_asks_for_what_its_parent_does_with_noise_of_its_own(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where not all rows are edited at once."""
    monkeypatch.setattr("octavo.worker.sampler.ADJUSTED_LOGITS", at_once * VOCAB)
    params = SamplingParams(top_k=9, presence_penalty=0.5, structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    mask = np.array([0b1011_0110_1101_0111], np.int32)

    def said(*plans: StepPlan) -> list[list[int]]:
        rows = Rows(ROWS, VOCAB)
        for plan in plans:
            rows.apply(plan)
        ids = [rows.sample(logits, [5, 0, 2], dict.fromkeys(range(3), mask)).ids.tolist() for _ in range(4)]
        assert all(mask[0] >> token & 1 for some in ids for token in some)
        return ids

    other = NoiseKey((9, 2), 3, 4)
    writes = [write(5, params), write(2, params)]
    forked = said(StepPlan(0, row_writes=writes), StepPlan(1, row_forks=[RowFork(0, 5, 7, other)]))
    assert forked == said(StepPlan(0, row_writes=[*writes, replace(write(0, params), noise=other)]))
    assert [some[0] for some in forked] != [some[1] for some in forked]


@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_warm_up_leaves_no_trace(dtype: torch.dtype, processed: bool) -> None:
    rows = Rows(ROWS, VOCAB, processed=processed)
    rows.sampler.warm_up(dtype)
    assert not rows.table.words.any() and rows.sampler.special(StepPlan(0, row=[0], outputs=[1])) == []


class Matrix:
    """As much of a program as makes logits."""

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(1))
        self.most = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.most = max(self.most, len(hidden))
        return hidden @ self.weight.T


@pytest.mark.parametrize("slice_rows", [2, 1000])
def test_logprobs_of_prompts_come_in_slices(slice_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_runner.SLICE_LOGITS, "cpu", slice_rows * VOCAB)
    rows, program = Rows(ROWS, VOCAB), Matrix()
    prompts = PromptLogprobs(rows.table, VOCAB)
    kinds = {0: (3, 7), 2: (None, 5), 3: (0, 6)}  # row -> wanted, tokens of the prompt
    ids = {row: [(row + 5 * n) % VOCAB for n in range(count + 1)] for row, (_, count) in kinds.items()}
    writes = [write(row, SamplingParams(prompt_logprobs=wanted), ids[row], count) for row, (wanted, count) in kinds.items()]
    plans = [
        StepPlan(0, row=[0, 2, 3], start=[0, 0, 1], num_query=[4, 5, 2], row_writes=writes),
        StepPlan(1, row=[3, 0], start=[3, 4], num_query=[4, 4]),
        StepPlan(2, row=[0, 1], start=[8, 6], num_query=[1, 1], row_forks=[RowFork(1, 0, 9, KEY)]),
    ]
    for plan in plans:
        rows.apply(plan)
        prompts.apply(plan)
        hidden = torch.randn(sum(plan.num_query) + 3, 8, generator=torch.Generator().manual_seed(plan.step))
        program.most = 0
        found = {one.entry: one.to_host().piece() for one in prompts.rankings(hidden, plan, program.logits)}
        assert program.most <= slice_rows and prompts.reached(plan) == bool(found) == (plan.step < 2)
        begin = 0
        for entry, (row, start, count) in enumerate(zip(plan.row, plan.start, plan.num_query)):
            wanted, num_prompt = kinds.get(row, (None, 0))
            reach = [] if wanted is None else range(start + 1, min(start + count, num_prompt - 1) + 1)  # the tokens that are expected
            first, told = found.get(entry, (start + 1, []))
            assert first == start + 1 and len(told) == len(reach)
            for position, one in zip(reach, told):
                scores = (hidden[begin + position - start - 1] @ program.weight.T).double().log_softmax(-1)
                assert math.isclose(one.logprob, float(scores[ids[row][position]]), abs_tol=1e-5)
                assert one.rank == 1 + int((scores > scores[ids[row][position]]).sum())
                assert list(one.top_ids) == scores.topk(wanted or 0).indices.tolist()
            begin += count
