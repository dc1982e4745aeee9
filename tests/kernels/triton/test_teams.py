"""Teams of rows that read keys together: what a row gets is what it gets alone, within rounding, and the same without blocks."""

from random import Random

import numpy as np
import pytest
import torch

from octavo.kernels.reference import attention as plain_attention
from octavo.kernels.triton.attention.decode_shares import decode_shares
from octavo.kernels.triton.attention.paged_attention import shares_of
from octavo.kernels.triton.attention.tiles import Tiles
from octavo.step import team_words as words_of_teams
from octavo.step.share_words import DEPTH, IN_ALL, DecodeShares
from octavo.step.shared_keys import FREE, SharedKeys, SharedReads
from octavo.step.team_words import Teams, most_teams, team_words
from tests.kernels.triton.test_attention import HEADS, KV_HEADS, Caches, Mix, assert_near, assert_same

SIZE = 16
GROUP = HEADS // KV_HEADS
Shared = list[tuple[int, int, int]]  # a row, the row whose first blocks it has, and how many
# Rows of two beginnings, one of which parts again, and a row without context.
MIX: Mix = [(1, 90), (1, 70), (1, 0), (1, 101), (1, 20), (1, 75), (1, 66), (1, 49), (1, 110), (1, 20), *[(1, 3)] * 6]
TREE: Shared = [(3, 0, 3), (1, 0, 2), (5, 0, 2), (6, 3, 3), (8, 7, 3), (9, 7, 1)]


def share(caches: Caches, shared: Shared) -> SharedKeys:
    """Gives rows the beginnings of others, and returns all that rows of one query have in common."""
    for row, other, blocks in shared:
        caches.tables[row, :blocks] = caches.tables[other, :blocks]
        for cache in caches.contiguous:
            cache[int(caches.regions[row]), : blocks * SIZE] = cache[int(caches.regions[other]), : blocks * SIZE]
    single = np.array([row for row, (queries, context) in enumerate(caches.mix) if queries == 1 and context], np.int32)
    context = np.array([caches.mix[row][1] for row in single], np.int32)
    tables = caches.tables.cpu().numpy().astype(np.int32)
    keys = SharedReads(tables, SIZE, FREE).nodes(single, context, np.zeros(len(tables), np.int64))
    return SharedKeys(keys.nodes, single[keys.rows].astype(np.int32))


def shares_with(caches: Caches, keys: SharedKeys, tiles: Tiles, of_teams: Tiles, wanted: int) -> DecodeShares:
    words = team_words(keys, len(caches.mix), of_teams.queries // GROUP, wanted)
    entries, lines = (torch.from_numpy(part).to(caches.q.device) for part in words)
    room = torch.nn.functional.pad(lines, (0, 0, 0, 1 + most_teams(len(caches.mix)) - len(lines)), value=-1)
    return shares_of(caches.query_start, caches.context_len, caches.paged[0], None, tiles, Teams(entries, room))


@pytest.mark.parametrize(
    ("dtype", "queries", "wanted"),
    [
        pytest.param(torch.float32, 16, 1, marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, 32, 99, marks=pytest.mark.soak),
        (torch.float16, 32, 1),
        (torch.float16, 16, 99),
    ],
    ids=str,
)
def test_rows_of_a_tree_agree_with_the_twin_however_they_are_cut(
    dtype: torch.dtype, queries: int, wanted: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_of_teams, "LEAST_PIECE", SIZE)
    caches = Caches(MIX, SIZE, dtype, device)
    keys = share(caches, TREE)
    assert len(keys.nodes) == 4
    of_teams = Tiles(keys=16, warps=4, stages=2, queries=queries)
    for programs in (1, 40):
        tiles = Tiles(keys=16, warps=4, stages=2, programs=programs, shares=2, grain=1)
        shares = shares_with(caches, keys, tiles, of_teams, wanted)
        before, in_all = shares.lines.clone(), int(shares.lines[0, IN_ALL])
        assert int(shares.lines[1 : 1 + in_all, DEPTH].max()) == (2 if wanted == 1 else 3)
        learned = torch.linspace(-1.5, 2.5, HEADS, device=device)
        features: list[dict[str, torch.Tensor]] = [{}, {"sinks": learned}, {"slopes": learned.abs() / 9}]
        for feature in features:
            got = caches.attend(tiles, shares=shares, of_teams=of_teams, **feature)
            assert_near(got, caches.exact(**feature))
            ways = (caches.attend(tiles, paged=paged, shares=shares, of_teams=of_teams, **feature) for paged in (True, False))
            assert_same(got, *ways)
            assert torch.equal(shares.lines, before)


def test_shares_of_rows_and_teams_are_those_of_the_twin(device: str) -> None:
    for seed in range(12):
        draw = Random(seed)
        mix: Mix = [(draw.choice((0, 1, 1, 1, 2)), draw.randrange(2, 200)) for _ in range(draw.randrange(2, 13))]
        caches = Caches(mix, SIZE, torch.float32, device)
        shared = [(row, draw.randrange(row), draw.randrange(6)) for row in range(1, len(mix))]
        full = [(context - 1) // SIZE for _, context in mix]
        keys = share(caches, [(row, other, min(count, full[row], full[other])) for row, other, count in shared])
        teams = Teams(*(torch.from_numpy(part).to(device) for part in team_words(keys, len(mix), draw.choice((2, 5)))))
        rows, cut = (caches.query_start, caches.context_len, None), (16, draw.randrange(1, 30), draw.randrange(1, 4), draw.randrange(1, 4))
        got, exact = decode_shares(*rows, KV_HEADS, *cut, teams).lines, plain_attention.decode_shares(*rows, KV_HEADS, *cut, teams)
        written = slice(1, 1 + int(exact[0, IN_ALL]))
        assert got.shape == exact.shape and got[0, IN_ALL] == exact[0, IN_ALL]
        assert torch.equal(got[written, : DEPTH + 1], exact[written, : DEPTH + 1])
