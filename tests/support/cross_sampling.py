"""What drawing and ranking must give on every machine: the part of `cross_cases.py` that is about sampling."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from octavo.kernels.reference import sampling as twin
from octavo.kernels.reference.philox import uniform
from tests.support.case_file import Case, Expected
from tests.support.draws import Row, allowed, draws_of, logits_of

FILTERS: tuple[dict[str, Any], ...] = (
    {}, {"top_k": 1}, {"top_k": 7}, {"top_k": 126}, {"top_k": 999}, {"top_p": 0.2}, {"top_p": 0.9}, {"top_p": 0.999999}, {"min_p": 0.1},
    {"min_p": 1e-6}, {"top_k": 50, "top_p": 0.9}, {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
)  # fmt: skip


def sampling_cases() -> Iterator[Case]:
    for vocab in (1, 15, 127, 128, 129, 1000, 20_000):
        rows = []
        for number, kind in enumerate(("normal", "ties", "equal", "zeros", "masked", "one", "peak")):
            for place, filters in enumerate(FILTERS):
                noise = (number, 2**32 - 1 - place, 3, vocab)
                rows.append(Row(kind, 100 * number + place, (0.7, 1.0, 1.3, 1e-3)[place % 4], noise=noise, position=place, **filters))
        yield from drawn_and_ranked(rows if vocab < 20_000 else rows[:12], vocab)
    for noise, position, vocab in (((1, 2, 3, 4), 7, 1), ((2**32 - 1,) * 4, 2**32 - 1, 515), ((0, 0, 0, 0), 0, 700)):
        numbers = uniform(torch.tensor([noise]), torch.tensor([position]), vocab)[0].numpy()
        arrays = {"noise": np.array(noise)}
        yield Case("noise", f"of {vocab} tokens", {"position": position}, arrays, [Expected("numbers", "floats", numbers)])


def drawn_and_ranked(rows: list[Row], vocab: int) -> Iterator[Case]:
    """Only rows of which exact arithmetic allows a single id: a float's last bit must not decide."""
    single = [len(ids) == 1 for ids in allowed(logits_of(rows, vocab), draws_of(rows))]
    rows = [row for row, alone in zip(rows, single) if alone]
    assert len(rows) > 0.8 * len(single), f"{len(rows)} of {len(single)} rows of {vocab} tokens are left"
    logits, draws = logits_of(rows, vocab), draws_of(rows)
    ids = twin.draw(logits, draws)
    arrays = {name: getattr(draws, name).numpy() for name in ("temperature", "top_p", "min_p", "top_k", "noise", "positions")}
    expected = [Expected("ids", "floats", ids.numpy())]
    yield Case("draw", f"{len(rows)} rows of {vocab}", {}, {"logits": logits.numpy(), **arrays}, expected)
    ranking = twin.rank(logits, ids, min(20, vocab))
    exact = [Expected(name, "floats", getattr(ranking, name).numpy().copy()) for name in ("chosen", "ranks", "near", "near_ids")]
    totals = Expected("totals", "floats", ranking.totals.numpy(), "each", 5e-7 + vocab / twin.ONE)
    yield Case("rank", f"{len(rows)} rows of {vocab}", {}, {"logits": logits.numpy(), "ids": ids.numpy()}, [*exact, totals])
