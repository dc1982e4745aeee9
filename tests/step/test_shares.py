"""The shares of decode attention: every tile of every row is somebody's, once, and they are counted once a step."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention import triton as backend
from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.triton import Shares
from octavo.kernels.reference.attention import decode_shares
from octavo.step.share_words import IN_ALL, LINE, most_parts, most_shares
from octavo.step.team_words import Teams

HEADS, TILE = 3, 16


@example(mix=[(1, TILE)] * 4, window=None, programs=4, each=1, grain=1)  # every share is a row
@given(
    mix=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500)), min_size=1, max_size=20),
    window=st.none() | st.integers(1, 90),
    programs=st.integers(1, 60),
    each=st.integers(1, 4),
    grain=st.integers(1, 9),
)
def test_every_tile_of_rows_with_one_query_is_in_one_share(
    mix: list[tuple[int, int]], window: int | None, programs: int, each: int, grain: int
) -> None:
    queries, contexts = (torch.tensor(numbers) for numbers in zip(*mix))
    starts = torch.cat([torch.zeros(1).long(), queries.cumsum(0)])
    shares = decode_shares(starts, contexts, window, HEADS, TILE, programs, each, grain)
    seen = {row: (max(end - (window or 500), 0), max(end, 1)) for row, (count, end) in enumerate(mix) if count == 1}
    every = [(row, head, key) for row, (first, end) in seen.items() for head in range(HEADS) for key in range(first, end, TILE)]
    lines = shares[1 : 1 + int(shares[0, IN_ALL])].tolist()
    found = [(row, head, key) for _, row, head, low, high, *_ in lines for key in range(low, max(high, low + 1), TILE)]
    assert sorted(found) == every
    assert len(lines) <= most_shares(len(mix), HEADS, programs, each) == len(shares) - 1 and shares.shape[1] == LINE

    lengths = [-(-(seen[line[1]][1] - seen[line[1]][0]) // TILE) for line in lines]
    assert lengths == sorted(lengths, reverse=True)
    for at, (token, row, head, _, _, end, part, parts, *_) in enumerate(lines):
        assert token == starts[row] and end == mix[row][1]
        assert [line[6] for line in lines[at - part * HEADS :: HEADS][:parts]] == list(range(parts))
        assert all(line[1:3] == [row, head] for line in lines[at - part * HEADS :: HEADS][:parts])
        assert parts == 1 or at < most_parts(programs, each)
    sizes = [-(-(high - low) // TILE) for _, _, _, low, high, *_ in lines]
    assert max(sizes, default=0) <= max(-(-len(every) // programs), 1)


def test_layers_of_one_window_take_the_same_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def count(query_start: Tensor, context_len: Tensor, k_cache: Tensor, window: int | None, teams: Tensor | None) -> Tensor:
        assert (teams is None) == (window is not None)  # rows with a window read alone
        asked.append(window)
        return torch.tensor(len(asked))

    monkeypatch.setattr(backend, "decode_shares", count)
    nothing = torch.zeros(1)
    shares = Shares(ForwardBatch(*[nothing] * 9, caches=[], block_size=16, teams=Teams(nothing, nothing)))
    given_out = [int(shares.of(window, nothing)) for window in (None, 9, None, 9, 70)]  # type: ignore[arg-type]
    assert given_out == [1, 2, 1, 2, 3] and asked == [None, 9, 70]
