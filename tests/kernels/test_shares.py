"""The shares of decode attention: every tile of every row is somebody's, once, and they are counted once a step."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention import triton as backend
from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.triton import Shares
from octavo.kernels.reference.decode_shares import decode_shares
from octavo.kernels.share_words import LINE

HEADS, TILE = 3, 16


def walked(shares: Tensor, program: int) -> list[tuple[int, int, int]]:
    """(row, KV head, first key) of each tile of a program's share, as the decode kernel goes over it."""
    lines = shares.tolist()
    share, in_all = lines[0][:2]
    start, tiles, _, row, first, _, following, _ = lines[1 + program]
    found = []
    for at in range(program * share, min((program + 1) * share, in_all)):
        found.append((row, (at - start) // tiles, first + (at - start) % tiles * TILE))
        if at + 1 == start + tiles * HEADS:
            start, tiles, _, row, first, _, following, _ = lines[following]
    return found


@example(mix=[(1, TILE)] * 4, window=None, programs=4, least=1)  # every share is a row
@given(
    mix=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500)), min_size=1, max_size=20),
    window=st.none() | st.integers(1, 90),
    programs=st.integers(1, 60),
    least=st.integers(1, 5),
)
def test_every_tile_of_rows_with_one_query_is_in_one_share(
    mix: list[tuple[int, int]], window: int | None, programs: int, least: int
) -> None:
    queries, contexts = (torch.tensor(numbers) for numbers in zip(*mix))
    shares = decode_shares(torch.cat([torch.zeros(1).long(), queries.cumsum(0)]), contexts, window, HEADS, TILE, programs, least)
    found = [walked(shares, program) for program in range(programs)]
    seen = {row: (max(end - (window or 500), 0), max(end, 1)) for row, (count, end) in enumerate(mix) if count == 1}
    assert [one for part in found for one in part] == [
        (row, head, key) for row, (first, end) in seen.items() for head in range(HEADS) for key in range(first, end, TILE)
    ]
    sizes = [len(part) for part in found if part]
    assert all(size == sizes[0] for size in sizes[:-1]) and (len(sizes) < 2 or sizes[0] >= least)
    assert shares.shape == (2 + programs + len(mix), LINE)


def test_layers_of_one_window_take_the_same_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def count(query_start: Tensor, context_len: Tensor, k_cache: Tensor, window: int | None) -> Tensor:
        asked.append(window)
        return torch.tensor(len(asked))

    monkeypatch.setattr(backend, "decode_shares", count)
    nothing = torch.zeros(1)
    shares = Shares(ForwardBatch(*[nothing] * 9, caches=[], block_size=16))
    given_out = [int(shares.of(window, nothing)) for window in (None, 9, None, 9, 70)]  # type: ignore[arg-type]
    assert given_out == [1, 2, 1, 2, 3] and asked == [None, 9, 70]
