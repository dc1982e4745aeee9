"""A step that ranks share gives what one rank gives with all weights; where a rank does not come, the call says which."""

from typing import Any

import pytest

from octavo.kernels.cpu.library import F32, Q8
from tests.support.native import levels_here
from tests.support.rank_processes import Ranks
from tests.support.rank_step import TOLERANCE

LEVELS = levels_here()


@pytest.mark.parametrize(
    "level, size, threads, embed_kind, split_vocab, kind",
    [(LEVELS[0], 2, 1, F32, True, "plain"), (LEVELS[-1], 2, 2, F32, False, "cohere"), (LEVELS[-1], 3, 2, Q8, True, "plain")],
)
def test_ranks_that_share_a_step_give_what_one_rank_gives(
    level: str, size: int, threads: int, embed_kind: int, split_vocab: bool, kind: str
) -> None:
    """In a layer of the kind "cohere", they sum the results of attention and MLP together."""
    given = {"level": level, "threads": threads, "embed_kind": embed_kind, "split_vocab": split_vocab, "kind": kind}
    with Ranks(size, "tests.support.rank_step:steps", given, slot_bytes=1 << 14) as ranks:
        results = ranks.results()
    for batch in zip(*results, strict=True):
        assert [result["code"] for result in batch] == [0] * size
        assert max(result["off"] for result in batch) < TOLERANCE
        assert len({result["bits"] for result in batch}) == 1  # hidden states are the same on every rank
        assert best_of_all(batch) == batch[0]["expected"]


def best_of_all(ranks: tuple[dict[str, Any], ...]) -> list[int]:
    """Of each sample the id with the largest logit on any rank, the lower of equals."""
    samples = zip(*(zip(rank["largest"], rank["best"], strict=True) for rank in ranks), strict=True)
    return [min(sample, key=lambda pair: (-pair[0], pair[1]))[1] for sample in samples]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_that_a_rank_does_not_come_to_says_which(threads: int) -> None:
    given = {"level": LEVELS[-1], "threads": threads}
    with Ranks(3, "tests.support.rank_step:step_that_rank_1_leaves", given) as ranks:
        assert ranks.results() == [2, 0, 2]
