"""Logprobs of the processed kind are those of a softmax over what a token is drawn from, by torch and by the native library.

Triton's kernels: `tests/kernels/triton/test_draw.py`.
"""

from array import array
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.cpu.sampling import NativeSampling
from octavo.kernels.reference import sampling as twin
from octavo.kernels.reference.sampling import Draws
from octavo.messages import NoiseKey, RowWrite
from octavo.sampling_params import SamplingParams
from octavo.worker.executor import Masks
from octavo.worker.sampler import Sampling
from tests.support.asking import Asked, asking
from tests.support.draws import INF, assert_logprobs_of_the_drawn
from tests.support.native import levels_here, running
from tests.support.sampled import Sampled, sample_rows

VOCAB = 24
PLAIN = Asked(SamplingParams(max_tokens=None), (), [], [3, 1, 4], 2)
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.4]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 100]),
        "top_p": st.sampled_from([1.0, 1.0, 0.6]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "logprobs": st.sampled_from([None, 0, 3, 30]),
    }
)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    asked = draw(asking(VOCAB) | st.just(PLAIN))
    if draw(st.booleans()):  # under a grammar, which goes with neither of these
        guided = replace(asked.params, structured_outputs={"regex": "a"}, allowed_token_ids=None, bad_words=())
        asked = replace(asked, params=guided, bad_words=[])
    return replace(asked, params=replace(asked.params, **draw(filters)))


def drawn(logits: Tensor, batch: list[Asked], masks: dict[int, Masks], sampling: Sampling, processed: bool = True) -> Sampled:
    writes = [
        RowWrite(row, row, array("i", a.ids), a.num_prompt, 0, [[]], a.params, a.end_ids, a.bad_words, NoiseKey((1, row), 0, 0), b"")
        for row, a in enumerate(batch)
    ]
    return sample_rows(logits, writes, sampling, masks, processed)


def by_rank(level: str) -> Sampling:
    if level == "torch":
        return ops
    with running(level) as library:
        return NativeSampling(library)


def adjusted(logits: Tensor, asked: Asked, allowed_by_grammar: set[int]) -> Tensor:
    """Rule by rule, a token at a time."""
    params, output = asked.params, asked.ids[asked.num_prompt :]
    banned = {word[-1] for word in asked.bad_words if output[len(output) - len(word) + 1 :] == word[:-1] and len(word) <= len(output) + 1}
    banned |= set(asked.end_ids) if len(output) < params.min_tokens else set()
    allowed = set(range(VOCAB)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    banned = set() if params.allowed_token_ids is not None and banned >= allowed else banned
    scores = logits.clone()
    for token in range(VOCAB):
        if token not in allowed & allowed_by_grammar or token in banned:
            scores[token] = -INF
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in asked.ids:
            scores[token] = scores[token] / params.repetition_penalty if scores[token] > 0 else scores[token] * params.repetition_penalty
        if token in output:
            scores[token] -= torch.tensor(params.frequency_penalty) * output.count(token) + params.presence_penalty
    return scores


def filters_of(params: SamplingParams) -> Draws:
    """Of a greedy row: none, at temperature 1."""
    kept = SamplingParams() if params.greedy else params
    one = {name: torch.tensor([float(getattr(kept, name))]) for name in ("temperature", "top_p", "min_p")}
    return Draws(**one, top_k=torch.tensor([max(kept.top_k, 0)]), noise=torch.zeros(1, 4), positions=torch.zeros(1))


# promise: logprobs-mode-gpu
@pytest.mark.parametrize("by", ["torch", levels_here()[-1]])
@settings(max_examples=25)
@given(batch=st.lists(requests(), min_size=1, max_size=4), seed=st.integers(0, 999), at_once=st.sampled_from([1, 2 * VOCAB, 2**20]))
def test_they_are_those_of_what_a_token_is_drawn_from(by: str, batch: list[Asked], seed: int, at_once: int) -> None:
    sampling, rng = by_rank(by), np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((len(batch), VOCAB), np.float32) * 3)
    bits = {row: rng.integers(0, 2, 32, dtype=np.uint8) for row, asked in enumerate(batch) if asked.params.structured_outputs}
    for row, allowed in bits.items():
        allowed[next(token for token in range(VOCAB) if token not in batch[row].end_ids)] = 1
    masks = {row: np.packbits(found, bitorder="little").view(np.int32) for row, found in bits.items()}
    with patch.object(twin, "LOGITS_AT_ONCE", at_once):
        found = drawn(logits, batch, masks, sampling)
    assert found.ids.tolist() == drawn(logits, batch, masks, sampling, processed=False).ids.tolist(), "what is told changes nothing"
    assert sorted(found.logprobs) == [row for row, asked in enumerate(batch) if asked.params.logprobs is not None]
    for row, one in found.logprobs.items():
        may_come = set(np.flatnonzero(bits[row][:VOCAB]).tolist()) if row in bits else set(range(VOCAB))
        scores = adjusted(logits[row], batch[row], may_come)
        assert len(one.top_ids) == min(batch[row].params.logprobs or 0, VOCAB)
        assert_logprobs_of_the_drawn(scores[None], filters_of(batch[row].params), [int(found.ids[row])], [one])


def test_an_id_just_beyond_a_cut_is_within() -> None:
    """Whoever drew it rounded a mass otherwise."""
    logits, draws = torch.tensor([[2.0, 1.0, 0.0]]), filters_of(SamplingParams(top_k=1))
    assert twin.drawn_from(logits, draws, torch.tensor([1]), filtered=True).tolist() == [[0.0, -1.0, -INF]]


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("by", ["torch", levels_here()[-1]])
def test_where_nothing_is_left_what_was_said_is_certain(by: str, top_k: int) -> None:
    """Bad words may leave nothing of what a grammar allows; JSON has no word for a number that is none."""
    asked = replace(PLAIN, params=SamplingParams(top_k=top_k, logprobs=2), bad_words=[[7]])
    only = np.array([1 << 7], np.int32)
    one = drawn(torch.zeros(1, VOCAB), [asked], {0: only}, by_rank(by)).logprobs[0]
    assert (one.logprob, one.rank, one.top_logprobs) == (0.0, 1, (0.0, -INF))
