"""The sampler against plain Python, against probability, and against itself in other company."""

import math
from array import array
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.reference import sampling
from octavo.kernels.reference.philox import uniform
from octavo.kernels.reference.sampling import Draws, distances, draw, edit_logits, kept, mass_above, nearest
from octavo.messages import NoiseKey, RowWrite, StepPlan
from octavo.sampling_params import SamplingParams
from octavo.step.logit_edits import pack, unpack
from tests.support.sampled import Rows, Sampled, sample_rows

INF = math.inf
ANY_KEY = NoiseKey((1, 2), 0, 0)


@dataclass(frozen=True)
class Case:
    """One row to sample."""

    params: SamplingParams
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    noise: NoiseKey = ANY_KEY


def writes_of(cases: list[Case], rows: list[int]) -> list[RowWrite]:
    return [
        RowWrite(
            row=row,
            seq_id=0,
            token_ids=array("i", c.prompt + c.output),
            num_prompt=len(c.prompt),
            start=0,
            tables=[[]],
            params=c.params,
            end_ids=c.end_ids,
            bad_words=[],
            noise=c.noise,
            root=b"",
        )
        for row, c in zip(rows, cases)
    ]


def run(logits: Tensor, cases: list[Case], rows: list[int] | None = None) -> Sampled:
    return sample_rows(logits, writes_of(cases, list(range(len(cases))) if rows is None else rows))


# ---- what plain Python says


def scaled_distances(logits: list[float], temperature: float) -> list[float]:
    values = torch.tensor(logits)
    return [abs(float((values.max() - v) / torch.tensor(temperature))) for v in values]


def naive_kept(distance: list[float], params: SamplingParams) -> list[int]:
    """The ids that pass, in order: rule by rule, one token at a time."""
    mass = [int(float(torch.exp(torch.tensor(-d))) * 2**40) for d in distance]
    order = sorted(range(len(distance)), key=lambda t: (distance[t], t))
    top_p, min_p = torch.tensor([params.top_p, params.min_p]).tolist()  # as the table holds them
    kept = [t for t in order if mass[t] >= int(min_p * 2**40)]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        total, before, nucleus = sum(mass[t] for t in kept), 0, []
        for t in kept:
            if before < top_p * total or not nucleus:
                nucleus.append(t)
            before += mass[t]
        kept = nucleus
    return kept


def naive_draw(logits: list[float], case: Case) -> int:
    distance = scaled_distances(logits, case.params.temperature)
    noise = torch.tensor([[*case.noise.key, case.noise.stream, case.noise.high]])
    unit = uniform(noise, torch.tensor([len(case.prompt + case.output)]), len(logits))[0]
    score = (-torch.log(-torch.log(unit)) - torch.tensor(distance)).tolist()
    return min(naive_kept(distance, case.params), key=lambda t: (-score[t], t))


# ---- strategies: ties, gaps and extremes

logit = st.sampled_from([0.0, -0.0, 1.0, 1.5, 1.5000001, -3.0, 1e4, -1e4, -INF]) | st.floats(-30, 30, width=32)
logit_rows = st.lists(logit, min_size=1, max_size=24).filter(lambda row: max(row) > -INF)
drawn_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-3, 0.7, 1.0, 1e3]),
    top_k=st.sampled_from([0, 1, 2, 3, 5, 8, 30]),
    top_p=st.sampled_from([1e-50, 0.2, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0]),
)
keys = st.builds(NoiseKey, st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 9)), st.integers(0, 3), st.integers(0, 3))


def draws_of(params: SamplingParams) -> Draws:
    one = {name: torch.tensor([float(getattr(params, name))]) for name in ("temperature", "top_p", "min_p")}
    return Draws(**one, top_k=torch.tensor([max(params.top_k, 0)]), noise=torch.zeros(1, 4), positions=torch.zeros(1))


# promise: samplingparams-top-p
# promise: samplingparams-top-p
@settings(max_examples=80)
@given(logits=logit_rows, params=drawn_params, width=st.integers(1, 24))
@example([1.0, 1.0], SamplingParams(top_p=0.5), 2)  # half the mass lies before the second: it goes
@example([1.0, 1.0, 0.0], SamplingParams(min_p=1.0), 3)  # both reach all of the highest probability
@example([2.0, 2.0, 2.0, 0.0], SamplingParams(top_k=2), 4)  # the lower ids of equals
@example([3.0] + [0.0] * 9, SamplingParams(min_p=0.1, top_p=0.99), 1)  # what min-p takes counts in no mass
@example([0.0, -INF], SamplingParams(top_k=5), 2)
def test_filters_keep_what_plain_python_keeps(logits: list[float], params: SamplingParams, width: int) -> None:
    width = min(max(width, params.top_k), len(logits))
    distance = distances(torch.tensor([logits]), torch.tensor([params.temperature]))
    near, ids = nearest(distance, width)
    keep = kept(near, distance.shape[1], partial(mass_above, distance), draws_of(params))
    assert ids[0][keep[0]].tolist() == naive_kept(scaled_distances(logits, params.temperature), params)[:width]


@given(logits=logit_rows, params=drawn_params, key=keys, narrow=st.sampled_from([1, 2, 4, 1024]))
def test_the_draw_is_the_best_of_kept_logits_plus_noise(logits: list[float], params: SamplingParams, key: NoiseKey, narrow: int) -> None:
    case = Case(params, noise=key)
    with patch.object(sampling, "NARROW", narrow):  # a small one sends rows down the wide path too
        assert int(run(torch.tensor([logits]), [case]).ids) == naive_draw(logits, case)


def test_equal_scores_go_to_the_lower_id() -> None:
    def even(noise: Tensor, positions: Tensor, tokens: Tensor | int) -> Tensor:
        return torch.full((len(noise), tokens) if isinstance(tokens, int) else tokens.shape, 0.5)

    kinds = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(top_k=1500), SamplingParams(min_p=0.5)]
    logits = torch.zeros(len(kinds), 2000)
    logits[:, [70, 30, 1999]] = 3.0
    with patch.object(sampling, "uniform", even), patch.object(sampling, "uniform_at", even):
        assert run(logits, [Case(params) for params in kinds]).ids.tolist() == [30] * len(kinds)


# promise: samplingparams-top-p
@settings(max_examples=20)
@given(key=keys, temperature=st.floats(0.05, 50))
def test_filters_that_let_all_pass_change_nothing(key: NoiseKey, temperature: float) -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(5)) * 3
    params = [
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_k=3000),
        SamplingParams(temperature=temperature, min_p=1e-30),
    ]
    assert len(set(run(logits.expand(3, -1), [Case(p, noise=key) for p in params]).ids.tolist())) == 1


# ---- penalties and minimum lengths

small_ids = st.lists(st.integers(0, 7), max_size=12).map(tuple)


# promise: samplingparams-presence-penalty, samplingparams-repetition-penalty
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8),
    prompt=small_ids.filter(len),
    output=small_ids,
    repetition=st.sampled_from([0.5, 1.0, 1.3, 3.0]),
    frequency=st.sampled_from([-2.0, 0.0, 0.7]),
    presence=st.sampled_from([-1.0, 0.0, 2.0]),
    min_tokens=st.integers(0, 13),
    end_ids=st.sets(st.integers(0, 7), max_size=3).map(tuple),
)
def test_penalties_and_min_tokens_follow_their_rules(
    logits: list[float],
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    repetition: float,
    frequency: float,
    presence: float,
    min_tokens: int,
    end_ids: tuple[int, ...],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, min_tokens=min_tokens, max_tokens=None
    )
    want = list(logits)
    for t in range(8):
        if t in prompt + output:
            want[t] = want[t] / repetition if want[t] > 0 else want[t] * repetition
        want[t] -= frequency * output.count(t) + presence * (t in output)
        if t in end_ids and len(output) < min_tokens:
            want[t] = -INF
    raw = torch.tensor([[0.0] * 8, logits])
    ids = torch.tensor([[0] * 25, [*prompt, *output, *[7] * 25][:25]], dtype=torch.int32)  # the newest id is provisional
    prompts = torch.tensor([0, len(prompt)])
    scores = edit_logits(raw, [1], [1], [len(prompt + output)], [unpack(pack(params, end_ids, []))], ids, prompts)
    assert scores[0].tolist() == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert raw[1].tolist() == logits, "the caller's logits are left alone"


def test_an_end_id_is_sampled_only_from_min_tokens_on() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(2, 1)
    params = SamplingParams(temperature=0, min_tokens=2)
    cases = [Case(params, output=(2,), end_ids=(1,)), Case(params, output=(2, 2), end_ids=(1,))]
    assert run(logits, cases).ids.tolist() == [2, 1]


# ---- probability


# promise: samplingparams-temperature-1
@pytest.mark.parametrize("varied", ["position", "seed", "sample", "high"])
@pytest.mark.parametrize(("top_k", "limit"), [(0, 29.88), (4, 21.11)])  # chi-square of 7 and 3 degrees at p = 1e-4
def test_frequencies_match_the_softmax(varied: str, top_k: int, limit: float) -> None:
    count, vocab, temperature = 20_000, 8, 0.8
    logits = torch.tensor([1.0, 0.5, 2.0, -0.7, 0.0, 1.3, -1.5, 0.9])
    noise = torch.tensor([[1234, 0, 0, 0]]).repeat(count, 1)
    positions = torch.full((count,), 17)
    column = {"position": positions, "seed": noise[:, 0], "sample": noise[:, 1], "high": noise[:, 3]}[varied]
    column.copy_(torch.arange(count))
    ones = torch.ones(count)
    ids = draw(logits.expand(count, -1), Draws(ones * temperature, (ones * top_k).long(), ones, ones * 0, noise, positions))
    scaled = logits / temperature
    if top_k:
        scaled[logits < logits.topk(top_k).values[-1]] = -INF
    expected = scaled.softmax(-1) * count
    seen = torch.bincount(ids, minlength=vocab)
    assert (seen[expected == 0] == 0).all()
    assert (((seen - expected) ** 2 / expected)[expected > 0]).sum() < limit


def test_the_same_key_gives_the_same_text_and_another_sample_another() -> None:
    generator = torch.Generator().manual_seed(3)
    steps = torch.randn(24, 1, 200, generator=generator)
    params = SamplingParams(top_p=0.95, seed=5, max_tokens=None)

    def text(keys: list[NoiseKey], rows: list[int]) -> list[list[int]]:
        table = Rows(5, 200)
        table.apply(StepPlan(0, row_writes=writes_of([Case(params, noise=key) for key in keys], rows)))
        for logits in steps:
            table.sample(logits.expand(len(rows), -1), rows)
        return [table.said(row)[1:] for row in rows]

    first, second, other_seed = NoiseKey((5, 0), 0, 0), NoiseKey((5, 1), 0, 0), NoiseKey((5, 0), 0, 1)
    a, b, c = text([first, second, other_seed], [0, 1, 2])
    assert text([first], [4]) == [a]
    assert a != b and a != c and b != c
    assert len(set(a)) > 8, "the position takes part"


# ---- company

company_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3, 50]),
    top_p=st.sampled_from([0.6, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    min_tokens=st.sampled_from([0, 4]),
    logprobs=st.sampled_from([None, 0, 3]),
)
company_cases = st.builds(Case, company_params, small_ids.filter(len), small_ids, st.just((1, 2)), keys)


@settings(max_examples=15)
@given(
    cases=st.lists(company_cases, min_size=2, max_size=6),
    vocab=st.sampled_from([41, 1500, 36_867]),  # the last one is odd and long enough for torch to split over threads
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_a_row_gets_the_same_alone_in_a_batch_and_in_another_row(cases: list[Case], vocab: int, seed: int, data: st.DataObject) -> None:
    logits = torch.randn(len(cases), vocab, generator=torch.Generator().manual_seed(seed)) * 4
    together = run(logits, cases)
    order = data.draw(st.permutations(range(len(cases))))
    shuffled = run(logits[order], [cases[i] for i in order], rows=[2 * i + 1 for i in order])
    for place, i in enumerate(order):
        alone = run(logits[i : i + 1], [cases[i]], rows=[9])
        assert alone.ids[0] == together.ids[i] == shuffled.ids[place]
        assert alone.logprobs.get(0) == together.logprobs.get(i) == shuffled.logprobs.get(place)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_a_row_that_is_not_finite_disturbs_nobody(bad: float) -> None:
    kinds = [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(logprobs=2),
        SamplingParams(top_k=5, logprobs=2),
        SamplingParams(top_p=0.8, logprobs=2),
        SamplingParams(min_p=0.1, repetition_penalty=1.1, logprobs=2),
    ]
    logits = torch.randn(10, 2000, generator=torch.Generator().manual_seed(1))
    broken = logits.clone()
    broken[5:] = bad
    broken[7, ::2] = 0.5
    cases = [Case(params) for params in kinds * 2]
    whole, hurt = run(logits, cases), run(broken, cases)
    assert hurt.ids[:5].tolist() == whole.ids[:5].tolist()
    assert [hurt.logprobs[i] for i in range(5)] == [whole.logprobs[i] for i in range(5)]
    assert ((hurt.ids >= 0) & (hurt.ids < 2000)).all()


# ---- logprobs


# promise: samplingparams-logprobs, logprobs-raw-default
@given(
    row=st.lists(st.sampled_from([0.0, 2.5, -1.0, 7.0]) | st.floats(-50, 50, width=32), min_size=1, max_size=30),
    temperature=st.sampled_from([0.0, 1.5]),
    count=st.integers(0, 40),
)
def test_logprobs_are_those_of_the_raw_logits(row: list[float], temperature: float, count: int) -> None:
    params = SamplingParams(temperature=temperature, logprobs=count, presence_penalty=2.0, top_k=2)
    sampled = run(torch.tensor([row]), [Case(params, output=(0, 0))])
    chosen, got = int(sampled.ids), sampled.logprobs[0]
    want = torch.tensor(row, dtype=torch.float64).log_softmax(-1).tolist()
    distance = scaled_distances(row, 1.0)
    best = sorted(range(len(row)), key=lambda t: (distance[t], t))[:count]
    assert got.logprob == pytest.approx(want[chosen], abs=2e-5)
    assert got.rank == 1 + sum(d < distance[chosen] for d in distance)
    assert list(got.top_ids) == best
    assert got.top_logprobs == pytest.approx([want[t] for t in best], abs=2e-5)


def test_only_rows_that_ask_get_logprobs_and_greedy_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]])
    sampled = run(logits, [Case(SamplingParams(temperature=0)), Case(SamplingParams(temperature=0, logprobs=1))])
    assert sampled.ids.tolist() == [1, 0]
    assert list(sampled.logprobs) == [1]
