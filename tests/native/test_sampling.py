"""Sampling on every level the machine has says what its torch twin says: noise and distances bit for bit, ids but for near ties.

Where twin and library differ, plain float64 arithmetic has to allow both: two scores, or a mass and a cut, closer than a float tells.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.kernels import ops
from octavo.kernels.cpu.library import address
from octavo.kernels.cpu.sampling import NativeSampling
from octavo.kernels.reference import sampling as twin
from octavo.kernels.reference.philox import uniform
from octavo.kernels.reference.sampling import Draws, Ranking
from tests.support.draws import INF, Row, allowed, draws_of, logits_of, rows, word32
from tests.support.models import tiny_model
from tests.support.native import levels_here, running

LEVELS = levels_here()
BLOCK = 128  # tokens the library looks at together
VOCABS = (1, 15, 17, 127, 128, 129, 1000)


# ---- noise


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=30)
@given(noise=st.tuples(word32, word32, word32, word32), position=st.integers(0, 2**32 - 1), vocab=st.integers(1, 700))
def test_uniforms_are_the_twins_bit_for_bit(level: str, noise: tuple[int, ...], position: int, vocab: int) -> None:
    words, found = np.array(noise), np.full(vocab + 1, np.nan, np.float32)
    with running(level) as library:
        library.call.octavo_uniform(address(words), position, address(found), vocab)
    assert np.isnan(found[-1])
    assert found[:-1].tobytes() == uniform(torch.tensor([noise]), torch.tensor([position]), vocab)[0].numpy().tobytes()


# ---- draws


@settings(max_examples=50)
@given(batch=st.lists(rows, min_size=1, max_size=6), vocab=st.sampled_from(VOCABS), threads=st.integers(1, 3))
@example([Row("equal", 1, top_p=0.5), Row("zeros", 1, top_k=2), Row("ties", 1, min_p=1.0)], 1000, 1)  # cuts among equals
@example([Row("normal", 1, top_k=k) for k in (7, 8, 9)], 1000, 1)  # as many as there are blocks, one less, one more
@example([Row("equal", s, temperature=3e38) for s in range(6)], 129, 2)
def test_a_row_is_drawn_as_by_the_twin_on_every_level(batch: list[Row], vocab: int, threads: int) -> None:
    logits, draws = logits_of(batch, vocab), draws_of(batch)
    expected, right = twin.draw(logits, draws).tolist(), allowed(logits, draws)
    portable: list[int] = []
    for level in LEVELS:
        with running(level, threads) as library:
            found = NativeSampling(library).draw(logits, draws).tolist()
        portable = portable or found
        for row, mine, plain, theirs, ids in zip(batch, found, portable, expected, right):
            assert mine == theirs or {mine, theirs} <= ids, (level, row)
            assert mine == plain or row.top_p < 1, "only masses are rounded as a level likes"


@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("level", LEVELS)
def test_whole_vocabularies_are_drawn_and_ranked_as_by_the_twin(level: str, vocab: int) -> None:
    plain = Row("normal", 1, temperature=0.7)
    filters: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_k": 3000}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}]
    batch = [replace(plain, kind=kind, seed=n, position=n, **filters[n % 6]) for n, kind in enumerate(["normal"] * 6 + ["peak"] * 6)]
    logits, draws = logits_of(batch, vocab), draws_of(batch)
    expected = twin.draw(logits, draws).tolist()
    best = twin.rank(logits, torch.tensor(expected), 20)
    with running(level, 2) as library:
        found = NativeSampling(library).draw(logits, draws).tolist()
        ranked = NativeSampling(library).rank(logits, torch.tensor(expected), 20)
    assert torch.equal(ranked.near_ids, best.near_ids) and torch.equal(ranked.ranks, best.ranks)
    if found != expected:
        assert all({mine, theirs} <= ids for mine, theirs, ids in zip(found, expected, allowed(logits, draws)))
    assert len(set(found)) > 6


def test_near_ties_are_told_from_mistakes() -> None:
    """The measure itself: nearly every row allows one id, the twin's, and no other."""
    filters = ((0, 1, 0), (9, 0.9, 0), (0, 0.5, 0.01))
    batch = [Row("normal", seed, 0.7, *kind) for seed in range(30) for kind in filters]
    logits, draws = logits_of(batch, 1000), draws_of(batch)
    right = allowed(logits, draws)
    assert all(theirs in ids for theirs, ids in zip(twin.draw(logits, draws).tolist(), right))
    assert sum(len(ids) > 1 for ids in right) <= 1


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_frequencies_match_the_softmax(level: str, params: dict[str, float]) -> None:
    count, vocab = 20_000, 3 * BLOCK - 5
    places = torch.tensor([0, 3, 100, BLOCK - 1, BLOCK, 200, 2 * BLOCK + 1, vocab - 1])
    logits = torch.full((vocab,), -INF)
    logits[places] = torch.tensor([1.0, 0.5, 2.0, -0.7, 0.0, 1.3, -1.5, 0.9])
    draws = draws_of([Row("", 0, temperature=0.8, **params, position=n) for n in range(count)])  # type: ignore[arg-type]
    with running(level, 2) as library:
        ids = NativeSampling(library).draw(logits.expand(count, -1), draws)
    likely = (logits[places] / 0.8).softmax(-1)
    best = likely.sort(descending=True).values
    least = {"top_k": best[3], "top_p": best[int((best.cumsum(0) < 0.8).sum())], "min_p": 0.2 * best[0]}.get(next(iter(params), ""), 0.0)
    expected = likely * (likely >= least) / likely[likely >= least].sum() * count
    seen = torch.bincount(ids, minlength=vocab)
    assert seen.sum() == seen[places].sum() and (seen[places][expected == 0] == 0).all()
    square = ((seen[places] - expected) ** 2 / expected)[expected > 0]
    assert square.sum() < {8: 29.88, 7: 27.86, 5: 23.51, 4: 21.11}[len(square)]  # one fair run in 10,000 is above


@pytest.mark.parametrize("level", LEVELS)
def test_equal_scores_go_to_the_lower_id(level: str) -> None:
    """Two tokens whose noise is the same float: among so many numbers of 23 bits some are."""
    vocab = 100_000
    numbers = uniform(torch.tensor([[1, 2, 3, 4]]), torch.tensor([7]), vocab)[0]
    values, counts = numbers.unique(return_counts=True)
    twice = values[counts > 1][-1]
    logits = torch.full((1, vocab), -INF)
    logits[0, numbers == twice] = 0.0
    first = int((numbers == twice).nonzero()[0])
    with running(level) as library:
        assert NativeSampling(library).draw(logits, draws_of([Row("", 0)])).tolist() == [first]
        logits[0, first] = -1.0
        assert NativeSampling(library).draw(logits, draws_of([Row("", 0)])).tolist() != [first]


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_finite_gives_some_id_and_disturbs_no_neighbour(level: str, bad: float) -> None:
    all_three = {"top_k": 5, "top_p": 0.8, "min_p": 0.1}
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_k": 900}, {"top_p": 0.8}, {"min_p": 0.1}, all_three]
    for vocab in VOCABS:
        batch = [Row("normal", seed, **kind) for seed, kind in enumerate(3 * kinds)]
        logits, draws = logits_of(batch, vocab), draws_of(batch)
        broken = logits.clone()
        broken[6:12] = bad
        broken[12:, :: min(3, vocab)] = bad
        ids = torch.full((len(batch),), vocab - 1)
        with running(level, 2) as library:
            sampling = NativeSampling(library)
            whole, hurt = sampling.draw(logits, draws), sampling.draw(broken, draws)
            ranked, spoiled = sampling.rank(logits, ids, 20), sampling.rank(broken, ids, 20)
        assert torch.equal(hurt[:6], whole[:6]) and ((hurt >= 0) & (hurt < vocab)).all()
        assert torch.equal(spoiled.near_ids[:6], ranked.near_ids[:6]) and torch.equal(spoiled.totals[:6], ranked.totals[:6])
        assert (spoiled.near_ids.sort(1).values.diff(dim=1) > 0).all() and spoiled.near_ids.amin() >= 0 and spoiled.near_ids.amax() < vocab


# ---- ranking


@settings(max_examples=40)
@given(
    batch=st.lists(rows, min_size=1, max_size=5),
    vocab=st.sampled_from(VOCABS),
    count=st.sampled_from([0, 1, 5, 8, 20, 999, 1200]),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_row_is_ranked_as_by_the_twin_on_every_level(batch: list[Row], vocab: int, count: int, threads: int, data: st.DataObject) -> None:
    logits = logits_of(batch, vocab)
    ids = torch.tensor([data.draw(st.integers(0, vocab - 1)) for _ in batch])
    expected = twin.rank(logits, ids, count)
    for level in LEVELS:
        with running(level, threads) as library:
            found = NativeSampling(library).rank(logits, ids, count)
        for name in ("chosen", "ranks", "near", "near_ids"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), (level, name)
        assert ((found.totals - expected.totals).abs() <= 5e-7 * expected.totals + vocab).all(), level


def test_an_id_outside_the_vocabulary_is_not_read() -> None:
    with running("portable") as library, pytest.raises(AssertionError, match="ids of the vocabulary"):
        NativeSampling(library).rank(torch.zeros(2, 5), torch.tensor([0, 5]), 1)


# ---- in an engine


class Both:
    """Draws and ranks twice, and keeps what differs."""

    def __init__(self, native: NativeSampling) -> None:
        self.native, self.rows, self.wrong = native, 0, 0

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        found, expected = self.native.draw(logits, draws), twin.draw(logits, draws)
        self.rows += len(found)
        if not torch.equal(found, expected):
            self.wrong += sum(not {a, b} <= ids for a, b, ids in zip(found.tolist(), expected.tolist(), allowed(logits, draws)))
        return found

    def sample(self, logits: Tensor, best: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
        expected = twin.sample(logits, temperature, noise, positions)
        found = self.native.sample(logits, best, temperature, noise, positions)
        self.rows += len(found)
        self.wrong += int((found != expected).sum())
        return found

    def rank(self, logits: Tensor, ids: Tensor, count: int) -> Ranking:
        found, expected = self.native.rank(logits, ids, count), twin.rank(logits, ids, count)
        self.rows += len(ids)
        self.wrong += int((found.near_ids != expected.near_ids).any(1).sum()) + int((found.ranks != expected.ranks).sum())
        return found


def test_an_engine_with_seeds_draws_what_the_twin_draws_from_its_logits(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "LlamaForCausalLM", seed=5)
    settings = {"num_gpu_blocks_override": 60, "max_num_seqs": 8, "skip_tokenizer_init": True}
    filters: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.9, "n": 2}, {"min_p": 0.05}, {"logprobs": 3}, {"prompt_logprobs": 2}]
    params = [SamplingParams(seed=9, max_tokens=20, ignore_eos=True, temperature=0.9, **kind) for kind in filters]
    prompts = [[3, 5, 7 + n] for n in range(len(params))]
    texts = []
    for _ in range(2):
        with LLM(str(folder), **settings) as llm:  # type: ignore[arg-type]
            runner = llm._core.executor  # type: ignore[attr-defined]
            native = runner.program._sampling
            assert isinstance(native, NativeSampling)
            runner.program._sampling = runner.sampler._sampling = runner.prompts._sampling = both = Both(native)
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert both.rows > 160 and both.wrong == 0
        texts.append([sample.token_ids for output in outputs for sample in output.outputs])
    assert texts[0] == texts[1] and len({tuple(text) for text in texts[0]}) == 7
    with LLM(str(folder), native=False, **settings) as llm:  # type: ignore[arg-type]
        assert llm._core.executor.sampler._sampling is ops  # type: ignore[attr-defined]
