"""Sampling around a device's step gives what the sampler of the CPU gives, though the host knows no id: same ids, same logprobs."""

from array import array
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.reference import sampling
from octavo.kernels.row_words import RowLayout
from octavo.messages import NoiseKey, PromptPiece, RowFork, RowWrite, StepPlan
from octavo.sampling_params import SamplingParams
from octavo.worker import device_prompt_logprobs, device_sampler, prompt_logprobs
from octavo.worker.device_prompt_logprobs import DevicePromptLogprobs
from octavo.worker.device_rows import DeviceRows
from octavo.worker.device_sampler import DeviceSampler
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import Sampled, sample
from tests.support.asking import Asked, asking

VOCAB, ROWS, LENGTH = 24, 6, 48
CPU = torch.device("cpu")

filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.4]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 100]),
        "top_p": st.sampled_from([1.0, 0.6]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "logprobs": st.sampled_from([None, None, 0, 3]),
    }
)
word32 = st.integers(0, 2**32 - 1)
noise_keys = st.builds(NoiseKey, st.tuples(word32, word32), word32, word32)
plain_ask = st.builds(Asked, st.just(SamplingParams(max_tokens=None)), st.just((1,)), st.just([]), st.just([3, 1, 4]), st.just(2))


@dataclass(frozen=True)
class Request:
    asked: Asked
    noise: NoiseKey

    def write(self, row: int) -> RowWrite:
        a = self.asked
        return RowWrite(
            row=row, seq_id=row, token_ids=array("i", a.ids), num_prompt=a.num_prompt, start=0, tables=[[]], params=a.params,
            end_ids=a.end_ids, bad_words=a.bad_words, noise=self.noise, root=b"",
        )  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> Request:
    asked = draw(asking(VOCAB) | plain_ask)
    if draw(st.booleans()):  # under a grammar, which goes with neither of these
        guided = replace(asked.params, structured_outputs={"regex": "a"}, allowed_token_ids=None, bad_words=())
        asked = replace(asked, params=guided, bad_words=[])
    return Request(replace(asked, params=replace(asked.params, **draw(filters))), draw(noise_keys))


def mask_of(row: int, table: RequestTable, rng: np.random.Generator) -> NDArray[np.int32]:
    """Some ids, of which not all are end ids; the bits behind the vocabulary are anything."""
    bits = rng.integers(0, 2, 32, dtype=np.uint8)
    bits[rng.choice([token for token in range(VOCAB) if token not in table.end_ids[row]])] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Both:
    """A table and its sampler, rows of a device and theirs, brought to the same state by the same plans."""

    def __init__(self, processed: bool = False) -> None:
        self.processed = processed
        layout = RowLayout(2, LENGTH)
        self.table, self.rows = RequestTable(ROWS, LENGTH, 2), DeviceRows(ROWS, layout, CPU)
        self.sampler = DeviceSampler(self.rows, VOCAB, CPU, processed)

    def apply(self, plan: StepPlan) -> None:
        for one in (self.table, self.rows, self.sampler):
            one.apply(plan)  # type: ignore[attr-defined]

    def step(self, logits: Tensor, plan: StepPlan, rng: np.random.Generator) -> None:
        """Samples the plan's entries, both ways. logits: [entries, V]"""
        where = [entry for entry, sampled in enumerate(plan.samples) if sampled]
        rows = torch.tensor(plan.row)
        guided = [entry for entry in where if self.table.params[plan.row[entry]].structured_outputs]
        masks = {entry: mask_of(plan.row[entry], self.table, rng) for entry in guided}
        by_index = {where.index(entry): mask for entry, mask in masks.items()}
        expected = sample(logits[where].float(), rows[where], self.table, sampling, masks=by_index, processed=self.processed)
        for entry, mask in masks.items():
            assert mask[0] >> int(expected.ids[where.index(entry)]) & 1, "an id that is not allowed"
        self.table.append(rows[where], expected.ids)
        ids = torch.full((len(plan.row),), 0, dtype=torch.int32)
        lines = rows[where]
        drawn = sampling.sample(logits[where], self.rows.temperature[lines], self.rows.noise[lines], self.rows.num_tokens[lines])
        ids[where] = drawn.int()
        self.rows.token_ids[lines, self.rows.num_tokens[lines].long()] = drawn.int()
        self.rows.num_tokens[lines] += 1
        found = self.sampler.sample(logits, self.sampler.special(plan), plan.row, ids, masks).to_host()
        self._assert_same(plan, where, expected, ids, {where.index(entry): one for entry, (one,) in found.logprobs().items()})

    def _assert_same(self, plan: StepPlan, where: list[int], expected: Sampled, ids: Tensor, logprobs: object) -> None:
        assert ids[where].tolist() == expected.ids.tolist()
        assert logprobs == expected.logprobs
        for row in plan.row:
            length = int(self.table.num_tokens[row])
            assert length == int(self.rows.num_tokens[row])
            assert self.rows.token_ids[row, :length].tolist() == self.table.token_ids[row, :length].tolist()


@settings(max_examples=60)
@given(
    tenants=st.lists(requests(), min_size=1, max_size=4),
    newcomers=st.lists(requests(), min_size=2, max_size=2),
    forked=st.booleans(),
    key=noise_keys,
    seed=st.integers(0, 99),
    adjusted_at_once=st.sampled_from([VOCAB, 3 * VOCAB, 2**24]),
    processed=st.booleans(),
)
def test_ids_and_logprobs_are_those_of_the_sampler(
    tenants: list[Request], newcomers: list[Request], forked: bool, key: NoiseKey, seed: int, adjusted_at_once: int, processed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(device_sampler, "ADJUSTED_LOGITS", adjusted_at_once)
    both = Both(processed)
    monkey.undo()
    order = [5, 0, 3, 2][: len(tenants)]
    both.apply(StepPlan(0, row_writes=[one.write(row) for row, one in zip(order, tenants)]))
    for step in range(6):
        plan = StepPlan(step, row=order, samples=[(seed >> step & 1) == 0 or n % 2 == 0 for n in range(len(order))])
        if step == 3:  # others take over a row or fork it
            order = [*order[1:], 1, 4]
            plan.row, plan.samples = order, [True] * len(order)
            plan.row_writes = [one.write(row) for row, one in zip((1, 4), newcomers)]
            if forked and len(order) > 2:
                plan.row_writes, plan.row_forks = plan.row_writes[:1], [RowFork(4, order[0], 9, key)]
        if plan.row_writes or plan.row_forks:
            both.apply(plan)
        logits = torch.randn(len(order) + 1, VOCAB, generator=generator) * 3
        both.step(logits.to(torch.bfloat16) if seed % 2 else logits, plan, np.random.default_rng(seed + step))


def test_a_row_that_is_not_finite_stays_marked() -> None:
    both = Both()
    params = SamplingParams(top_k=3, logprobs=1)
    both.apply(StepPlan(0, row_writes=[Request(Asked(params, (), [], [1, 2], 1), NoiseKey((1, 2), 3, 4)).write(0)]))
    ids = torch.tensor([-1], dtype=torch.int32)
    logits = torch.full((1, VOCAB), torch.nan)
    found = both.sampler.sample(logits, [0], [0], ids)
    assert ids.tolist() == [-1] and list(found.logprobs()) == [0]


def test_nothing_is_special_where_nobody_asks_for_more() -> None:
    both = Both()
    plan = StepPlan(0, row=[0, 1], samples=[True, True])
    plain = [SamplingParams(), SamplingParams(temperature=0, top_k=7, top_p=0.5)]  # filters cannot change the best one
    plan.row_writes = [Request(Asked(p, (1,), [], [1, 2], 1), NoiseKey((1, 2), 3, 4)).write(row) for row, p in enumerate(plain)]
    both.apply(plan)
    assert both.sampler.special(plan) == []
    asked = Request(Asked(SamplingParams(logprobs=0), (), [], [1], 1), NoiseKey((1, 2), 3, 4))
    both.apply(StepPlan(1, row_writes=[asked.write(1)]))
    assert both.sampler.special(plan) == [1]
    assert both.sampler.special(StepPlan(2, row=[1, 0], samples=[False, True])) == []
    both.apply(StepPlan(3, row_writes=[replace(plan.row_writes[0], row=1)]))
    assert both.sampler.special(plan) == [], "the next tenant asks for nothing"


@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_warm_up_leaves_no_trace(dtype: torch.dtype, processed: bool) -> None:
    both = Both(processed)
    both.sampler.warm_up(dtype)
    assert not both.rows.words.any() and both.sampler.special(StepPlan(0, row=[0], samples=[True])) == []


class Matrix:
    """As much of a program as makes logits."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(1))
        self.most = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.most = max(self.most, len(hidden))
        return hidden @ self.weight.T


@pytest.mark.parametrize("slice_rows", [2, 1000])
def test_logprobs_of_prompts_are_those_of_the_cpu_in_slices(slice_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_prompt_logprobs, "SLICE_LOGITS", slice_rows * VOCAB)
    both, program = Both(), Matrix()
    prompts = DevicePromptLogprobs(both.rows, VOCAB)
    kinds = [(0, 3, 7), (2, None, 5), (3, 0, 6)]  # row, wanted, tokens of the prompt
    writes = []
    for row, wanted, count in kinds:
        ids = [(row + 5 * n) % VOCAB for n in range(count + 1)]
        asked = Asked(SamplingParams(prompt_logprobs=wanted), (), [], ids, count)
        writes.append(Request(asked, NoiseKey((1, 2), 3, 4)).write(row))
    plans = [
        StepPlan(0, row=[0, 2, 3], start=[0, 0, 1], num_query=[4, 5, 2], row_writes=writes),
        StepPlan(1, row=[3, 0], start=[3, 4], num_query=[4, 4]),
        StepPlan(2, row=[0, 1], start=[8, 6], num_query=[1, 1], row_forks=[RowFork(1, 0, 9, NoiseKey((1, 2), 3, 4))]),
    ]
    for plan in plans:
        both.apply(plan)
        prompts.apply(plan)
        hidden = torch.randn(sum(plan.num_query) + 3, 8, generator=torch.Generator().manual_seed(plan.step))
        expected = prompt_logprobs.prompt_logprobs(hidden, plan, both.table, program, sampling)  # type: ignore[arg-type]
        program.most = 0
        found: dict[int, PromptPiece] = {one.entry: one.to_host().piece() for one in prompts.rankings(hidden, plan, program.logits)}
        assert found == expected and program.most <= slice_rows
        assert bool(found) == (plan.step < 2)
