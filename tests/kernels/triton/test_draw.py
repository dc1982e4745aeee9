"""Draws and rankings on the device are those of the twins: distances and cuts by count exactly, the rest but for near ties.

Where a draw differs, plain float64 arithmetic has to allow both ids (`tests/support/draws.py`).
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.reference import sampling as twin
from octavo.kernels.reference.philox import uniform
from octavo.kernels.reference.sampling import Draws, drawn_from, rank_drawn
from octavo.kernels.triton.sampling import rank as ranking
from octavo.kernels.triton.sampling.distances import CAPACITY, GROUP, TILE
from octavo.kernels.triton.sampling.draw import draw
from octavo.kernels.triton.sampling.rank import MOST, rank
from octavo.worker.sampler import listed
from tests.support.draws import INF, Row, allowed, assert_logprobs_of_the_drawn, draws_of, logits_of, rows

WIDE = CAPACITY + TILE - 5  # more tokens than can be members, and a last tile that is not full
VOCABS = (1, GROUP + 1, TILE + 3, WIDE)
FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 4500},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"min_p": 0.97},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 4500, "top_p": 0.7, "min_p": 0.95},
]


def there(draws: Draws, device: str) -> Draws:
    return Draws(*(getattr(draws, field.name).to(device) for field in fields(draws)))


def assert_drawn_as_by_the_twin(logits: Tensor, draws: Draws, device: str) -> list[int]:
    found, expected = draw(logits.to(device), there(draws, device)).tolist(), twin.draw(logits, draws).tolist()
    if found != expected:
        for row, (mine, theirs, ids) in enumerate(zip(found, expected, allowed(logits.float(), draws))):
            assert mine == theirs or {mine, theirs} <= ids, (row, mine, theirs, draws.take(torch.tensor([row])))
    return found


@settings(max_examples=5)
@given(batch=st.lists(rows, min_size=1, max_size=3), vocab=st.sampled_from(VOCABS))
@example([Row("equal", 1, top_p=0.5), Row("ties", 2, top_k=4500, top_p=0.5), Row("zeros", 1, top_k=4200)], WIDE)  # cuts among many equals
@example([Row("masked", 1, top_k=50), Row("one", 2, top_p=0.9), Row("masked", 3, top_k=5000, min_p=0.1)], WIDE)
def test_a_row_is_drawn_as_by_the_twin(device: str, batch: list[Row], vocab: int) -> None:
    assert_drawn_as_by_the_twin(logits_of(batch, vocab), draws_of(batch), device)


def edges(draws: Draws, tokens: Tensor, vocab: int) -> Tensor:
    """Rows in which the winner is the last token within the cut: tokens lie ever so little behind each other as their noise rises.

    tokens: those that count at all; returns logits [S, vocab]
    """
    noise = uniform(draws.noise, draws.positions, vocab)[:, tokens]
    logits = torch.full((len(noise), vocab), -40.0)
    logits[:, tokens] = -1e-5 * noise.argsort(1).argsort(1)
    return logits


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        (range(WIDE), torch.float32),
        pytest.param(range(WIDE), torch.bfloat16, marks=pytest.mark.soak),
        pytest.param(range(5, WIDE, GROUP), torch.float32, marks=pytest.mark.soak),
    ],
    ids=["wide", "wide, equals", "narrow"],
)
def test_every_filter_cuts_where_the_twin_cuts(tokens: range, dtype: torch.dtype, device: str) -> None:
    """Among more tokens than can be collected, and among one of each group; as bfloat16 many of them are equal."""
    batch = [Row("", 0, **filters, position=place) for place, filters in enumerate(FILTERS)]
    draws = draws_of(batch)
    logits = edges(draws, torch.tensor(tokens), WIDE)
    found = assert_drawn_as_by_the_twin(logits.to(dtype), draws, device)
    if dtype == torch.float32:
        order = logits.argsort(dim=1, descending=True, stable=True)
        assert [found[row] for row in (0, 1)] == [int(order[row, k - 1]) for row, k in ((0, 1), (1, 50))]


@pytest.mark.parametrize(("filters", "kept"), [({"top_k": 3}, 3), ({"top_p": 0.69}, 2), ({"min_p": 0.3}, 3)], ids=str)
def test_the_last_token_within_a_cut_can_be_drawn_and_the_next_cannot(filters: dict[str, Any], kept: int, device: str) -> None:
    """Masses 1, 0.37, 0.37, 0.22 and nothing: 0.69 of them is reached by the second one."""
    count, places = 12, [9, 500, TILE + 2, TILE + 100]
    logits = torch.full((count, TILE + 300), -30.0)
    logits[:, places] = torch.tensor([2.0, 1.0, 1.0, 0.5])
    batch = [Row("", 0, **filters, position=n) for n in range(count)]
    assert set(draw(logits.to(device), there(draws_of(batch), device)).tolist()) == set(places[:kept])


@pytest.mark.parametrize("beaten", [0, 3, 4, 7, 8], ids=lambda n: f"{n} beyond the cut")
def test_the_best_within_top_p_wins_however_many_beyond_it_have_better_scores(beaten: int, device: str) -> None:
    """Among the picks weighed first, those weighed next, and where all of them lie beyond the cut."""
    near = 64
    draws = draws_of([Row("", 0, top_p=(near - beaten - 0.5) / near, position=n) for n in range(2)])
    logits = edges(draws, torch.arange(3, 3 + 30 * near, 30), TILE + 3)
    expected = logits.argsort(dim=1, descending=True, stable=True)[:, near - beaten - 1].tolist()
    assert draw(logits.to(device), there(draws, device)).tolist() == expected == twin.draw(logits, draws).tolist()


def test_of_equals_the_first_k_can_be_drawn(device: str) -> None:
    draws = draws_of([Row("", 0, top_k=3, position=n) for n in range(10)])
    assert set(draw(torch.ones(10, TILE, device=device), there(draws, device)).tolist()) == {0, 1, 2}


def test_of_equals_top_p_keeps_the_lower_ids(device: str) -> None:
    """The cut lies within the second of three tiles."""
    draws, logits = draws_of([Row("", 0, top_p=0.5, position=n) for n in range(6)]), torch.ones(6, 3 * TILE)
    assert draw(logits.to(device), there(draws, device)).tolist() == twin.draw(logits, draws).tolist()


@pytest.mark.parametrize("top_k", [0, 50])
def test_what_lies_ever_so_little_beyond_min_p_is_never_drawn(top_k: int, device: str) -> None:
    batch = [Row("", 0, top_k=top_k, min_p=0.5, position=n) for n in range(2)]
    logits = torch.full((2, TILE), -0.6935)  # exp of it is 0.4998
    logits[:, 77] = 0
    assert draw(logits.to(device), there(draws_of(batch), device)).tolist() == [77, 77]


def test_no_filter_is_a_plain_draw_and_a_cut_row_beside_it_changes_nothing(device: str) -> None:
    plain = [Row("normal", seed, temperature=0.7, position=seed) for seed in range(2)]
    alone = assert_drawn_as_by_the_twin(logits_of(plain, WIDE), draws_of(plain), device)
    mixed = [one for row in plain for one in (replace(row, top_k=5), row)]
    assert assert_drawn_as_by_the_twin(logits_of(mixed, WIDE), draws_of(mixed), device)[1::2] == alone


def test_what_is_not_finite_gives_some_id_and_disturbs_no_neighbour(device: str) -> None:
    kinds: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_k": 4500, "top_p": 0.7, "min_p": 0.05}]
    batch = [Row("normal", 1, **kind) for kind in kinds for _ in range(4)]
    logits, draws = logits_of(batch, WIDE), there(draws_of(batch), device)
    for row, bad in enumerate((torch.nan, INF, -INF)):
        logits[row::4] = bad
    logits[::8, ::3] = 0.5
    hurt = draw(logits.to(device), draws).cpu()
    assert hurt[3::4].tolist() == draw(logits[3::4].to(device), draws.take(torch.arange(3, len(batch), 4, device=device))).tolist()
    assert ((hurt >= 0) & (hurt < WIDE)).all()


def test_parameters_may_be_columns_of_one_table(device: str) -> None:
    batch = [Row("normal", n, top_k=5 + n, top_p=0.9, noise=(2**32 - 1, n, 3, 4)) for n in range(3)]
    logits, draws = logits_of(batch, 300), draws_of(batch)
    words = torch.zeros(3, 11, dtype=torch.int32)
    floats = words.view(torch.float32)
    floats[:, 1], words[:, 2], floats[:, 3], floats[:, 4] = draws.temperature, draws.top_k, draws.top_p, draws.min_p
    words[:, 6:10] = draws.noise
    words, floats = words.to(device), words.to(device).view(torch.float32)
    columns = Draws(floats[:, 1], words[:, 2], floats[:, 3], floats[:, 4], words[:, 6:10], draws.positions.int().to(device))
    assert draw(logits.to(device), columns).tolist() == twin.draw(logits, draws).tolist()


# ---- ranking


@settings(max_examples=2)
@given(
    batch=st.lists(rows.map(lambda row: replace(row, top_p=min(row.top_p, 1.0 if row.top_p == 1 else 0.9))), min_size=1, max_size=3),
    vocab=st.sampled_from(VOCABS),
)
@example([Row("masked", 1, top_k=50), Row("ties", 2, 0.7, top_p=0.9), Row("peak", 3, min_p=0.1), Row("equal", 4)], WIDE)
def test_what_is_drawn_is_ranked_among_what_filters_leave(device: str, batch: list[Row], vocab: int) -> None:
    logits, draws = logits_of(batch, vocab), draws_of(batch)
    there_logits, there_draws = logits.to(device), there(draws, device)
    ids = draw(there_logits, there_draws)
    found = rank_drawn(
        lambda part: there_logits[part], vocab, there_draws, ids, True, lambda some, chosen: rank(some, chosen, 5), drawn_from
    )
    assert_logprobs_of_the_drawn(logits, draws, ids.tolist(), listed(found, [5] * len(batch)))


@settings(max_examples=8)
@given(
    batch=st.lists(rows, min_size=1, max_size=3),
    vocab=st.sampled_from(VOCABS),
    count=st.sampled_from([0, 1, 5, MOST, MOST + 1, 900]),
    data=st.data(),
)
def test_a_row_is_ranked_as_by_the_twin(device: str, batch: list[Row], vocab: int, count: int, data: st.DataObject) -> None:
    logits = logits_of(batch, vocab)
    ids = torch.tensor([data.draw(st.integers(0, vocab - 1)) for _ in batch])
    _assert_ranked(logits, ids, count, device)


def _assert_ranked(logits: Tensor, ids: Tensor, count: int, device: str) -> None:
    found, expected = rank(logits.to(device), ids.to(device), count), twin.rank(logits, ids, count)
    for name in ("chosen", "ranks", "near", "near_ids"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    assert ((found.totals.cpu() - expected.totals).abs() <= 2e-6 * expected.totals + logits.shape[1]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_short_floats_are_ranked_by_their_value(dtype: torch.dtype, device: str) -> None:
    logits = (torch.randn(4, WIDE, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    _assert_ranked(logits, torch.tensor([0, 5, WIDE - 1, 77]), 20, device)


def test_the_nearest_always_fit_however_they_lie(device: str) -> None:
    """All of a group's tokens nearer than the best of the last group that counts, and everything else equal to that."""
    logits = torch.zeros(1, WIDE)
    logits[0, : (MOST - 1) * GROUP] = 1 + torch.rand((MOST - 1) * GROUP, generator=torch.Generator().manual_seed(2))
    _assert_ranked(logits, torch.tensor([WIDE - 1]), MOST, device)


def test_many_are_ordered_a_few_rows_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "KEYS_AT_ONCE", 2 * 700)
    batch = [Row("ties", seed) for seed in range(5)]
    _assert_ranked(logits_of(batch, 700), torch.arange(5), 300, device)
