"""Ranks that share the vocabulary draw and rank what one rank does with the whole rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.reference import sampling
from octavo.kernels.reference.sampling import Draws, draw, drawn_from, rank, sample
from octavo.worker import rank_sampling
from octavo.worker.rank_sampling import RankSampling
from tests.support.ranks import ThreadComm, on_ranks


def on_all(size: int, vocab: int, logits: Tensor, call: Callable[[RankSampling, Tensor], Any]) -> list[Any]:
    """What each rank makes of its own part of the logits."""

    def work(comm: ThreadComm) -> Any:
        ranks = RankSampling(comm, vocab)
        return call(ranks, ranks.own(logits))

    return on_ranks(size, work)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), size=st.integers(2, 4), vocab=st.integers(16, 60), rows=st.integers(1, 4), narrow=st.sampled_from([2, 5, 1024]))
def test_ranks_draw_and_rank_as_one_does_with_whole_rows(data: st.DataObject, size: int, vocab: int, rows: int, narrow: int) -> None:
    values = st.sampled_from([-float("inf"), -2.0, 0.0, 0.25, 0.5, 1.0, 3.0, 3.0])  # many equals, and ids that are banned
    logits = torch.tensor(data.draw(st.lists(st.lists(values, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows)))
    logits[:, data.draw(st.integers(0, vocab - 1))] = 1.5  # one at least is left

    def column(*choices: float) -> Tensor:
        return torch.tensor(data.draw(st.lists(st.sampled_from(choices), min_size=rows, max_size=rows)))

    draws = Draws(
        column(0.3, 1.0, 2.5), column(0, 1, 3, 50).int(), column(1.0, 0.5, 0.9), column(0.0, 0.1, 0.9),
        torch.randint(2**31, (rows, 4), dtype=torch.int32), torch.arange(rows) + 7,
    )  # fmt: skip
    temperature = column(0.0, 0.7)
    with patch.object(sampling, "NARROW", narrow), patch.object(rank_sampling, "NARROW", narrow):
        drawn = draw(logits, draws)
        ranked = rank(logits, drawn, 3)
        for ids in on_all(size, vocab, logits, lambda one, own: one.draw(own, draws)):
            assert ids.tolist() == drawn.tolist()
        at_will = replace(draws, temperature=column(0.0, 0.3, 1.0, 2.5))
        said = torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows)))  # also what was cut
        whole = drawn_from(logits, at_will, said, filtered=True)
        assert torch.equal(torch.cat(on_all(size, vocab, logits, lambda one, own: one.drawn_from(own, at_will, said, True)), 1), whole)
        for found in on_all(size, vocab, logits, lambda one, own: one.rank(own, drawn, 3)):
            for name in ("chosen", "ranks", "totals", "near", "near_ids"):
                assert torch.equal(getattr(found, name), getattr(ranked, name)), name
    plain = sample(logits, temperature, draws.noise, draws.positions)
    for ids in on_all(size, vocab, logits, lambda one, own: one.sample(own, temperature, draws.noise, draws.positions)):
        assert ids.tolist() == plain.tolist()


def test_rows_as_wide_as_the_vocabulary_come_back_as_they_were() -> None:
    logits = torch.randn(3, 10)
    for own, whole in on_all(3, 10, logits, lambda one, own: (own, one.own(one.whole(own)))):
        assert torch.equal(own, whole)


def test_what_ranks_exchange_for_processed_logprobs_does_not_grow_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, widths, gather = 40_000, [0], ThreadComm.all_gather

    def counted(self: ThreadComm, x: Tensor) -> Tensor:
        widths.append(x.shape[-1])
        return gather(self, x)

    monkeypatch.setattr(ThreadComm, "all_gather", counted)
    logits, off = torch.randn(4, vocab) * 4, torch.zeros(4)
    top_k, top_p, min_p = torch.tensor([0, 5, 0, 0]), torch.tensor([1, 1, 0.5, 1]), torch.tensor([0, 0, 0, 0.01])
    draws, said = Draws(torch.tensor([0, 0.5, 1, 1]), top_k, top_p, min_p, off, off), torch.arange(4)
    found = on_all(2, vocab, logits, lambda one, own: one.drawn_from(own, draws, said, True))
    assert torch.equal(torch.cat(found, 1), drawn_from(logits, draws, said, filtered=True))
    assert max(widths) == sampling.NARROW
