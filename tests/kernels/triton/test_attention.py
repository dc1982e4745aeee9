"""Paged attention over mixes of rows, against its twin and against itself without blocks; nothing unwritten is ever read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.reference import attention as plain_attention
from octavo.kernels.triton.attention.decode_shares import decode_shares
from octavo.kernels.triton.attention.paged_attention import paged_attention, shares_of
from octavo.kernels.triton.attention.tiles import Tiles
from octavo.step.share_words import ARRIVED, IN_ALL, PARTS

HEADS, KV_HEADS, DIM = 6, 2, 16
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SMALL = Tiles(keys=16, warps=4, stages=2, queries=32)
LAGGING = Tiles(keys=16, warps=4, stages=2, queries=32, described=True, lagging=True)

Mix = list[tuple[int, int]]  # a row's queries and its context
# A chunk over a past, decode, a row that is not asked, a whole prompt over several tiles, padding of a graph, two queries, a first token.
MIX: Mix = [(7, 37), (1, 41), (0, 5), (19, 19), (1, 0), (2, 33), (1, 1), (1, 70)]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """As `torch.use_deterministic_algorithms` does it, which takes seconds to import the compiler first."""
    torch._C._set_deterministic_algorithms(True)
    yield
    torch._C._set_deterministic_algorithms(False)


class Caches:
    """Rows in a shuffled pool of blocks and in regions of their own, with NaN wherever no row has written."""

    def __init__(
        self, mix: Mix, size: int, dtype: torch.dtype, device: str, heads: int = HEADS, dim: int = DIM, index: torch.dtype = torch.int32
    ) -> None:
        generator = torch.Generator().manual_seed(size)
        length = max(context for _, context in mix)
        width = -(-length // size)
        blocks = torch.randperm(len(mix) * width, generator=generator).view(len(mix), width) + 1
        self.tables = torch.zeros_like(blocks)  # padded with the null block
        self.regions = torch.randperm(len(mix), generator=generator)[:, None]
        self.paged = [torch.full((len(mix) * width + 1, size, KV_HEADS, dim), torch.nan, dtype=dtype) for _ in "kv"]
        self.contiguous = [torch.full((len(mix), length + 3, KV_HEADS, dim), torch.nan, dtype=dtype) for _ in "kv"]
        counts = torch.tensor([queries for queries, _ in mix])
        self.query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        qkv = torch.randn(int(counts.sum()), heads + 2 * KV_HEADS, dim, generator=generator).to(dtype)
        qkv[:, heads:] = torch.nan
        for row, (queries, context) in enumerate(mix):
            used = -(-context // size)
            self.tables[row, :used] = blocks[row, :used]
            for part, (paged, contiguous) in enumerate(zip(self.paged, self.contiguous)):
                new = torch.randn(context, KV_HEADS, dim, generator=generator).to(dtype)
                contiguous[self.regions[row, 0], :context] = new
                paged.view(-1, KV_HEADS, dim)[(blocks[row] * size)[:, None].add(torch.arange(size)).flatten()[:context]] = new
                if context:
                    start = int(self.query_start[row])
                    qkv[start : start + queries, heads:].unflatten(1, (2, -1))[:, part] = new[context - queries :]
        self.q, *self.fresh = qkv.to(device).split([heads, KV_HEADS, KV_HEADS], 1)
        self.context_len = torch.tensor([context for _, context in mix])
        self.mix, self.scale = mix, dim**-0.5
        for name in ("tables", "regions", "query_start", "context_len"):
            setattr(self, name, getattr(self, name).to(device, index))
        self.paged, self.contiguous = ([cache.to(device) for cache in caches] for caches in (self.paged, self.contiguous))

    def attend(
        self, tiles: Tiles | None = None, paged: bool = True, fresh: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse = self.poison()
        max_query = max(queries for queries, _ in self.mix)
        caches, tables = (self.paged, self.tables) if paged else (self.contiguous, self.regions)
        rows = tables, self.query_start, self.context_len
        return paged_attention(
            self.q, *caches, *rows, self.scale, out, max_query, lse=lse, paged=paged, tiles=tiles,
            fresh=tuple(self.fresh) if fresh else None, **options,
        ), lse  # fmt: skip

    def exact(self, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = self.poison()
        rows = self.tables, self.query_start, self.context_len
        return plain_attention.paged_attention(self.q, *self.paged, *rows, self.scale, out, lse=lse, **options), lse

    def poison(self) -> tuple[Tensor, Tensor]:
        shape = self.q.shape
        out = torch.full(shape, torch.nan, dtype=self.q.dtype, device=self.q.device)
        return out, torch.full(shape[:2], torch.nan, device=self.q.device)


def assert_near(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    tolerance = TOLERANCE[got[0].dtype]
    torch.testing.assert_close(got[0].float(), exact[0].float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[1], exact[1], atol=1e-5, rtol=1e-5)


def assert_same(got: tuple[Tensor, Tensor], *others: tuple[Tensor, Tensor]) -> None:
    for other in others:
        assert all(map(torch.equal, got, other))


@pytest.mark.parametrize(
    ("dtype", "size", "window"),
    [
        pytest.param(torch.float32, 1, None, marks=pytest.mark.soak), (torch.float32, 2, 5), (torch.float32, 16, None),
        *(pytest.param(*one, marks=pytest.mark.soak)
          for one in ((torch.float32, 256, 5), (torch.float16, 4, None), (torch.float16, 16, 5))),
        (torch.bfloat16, 8, 5), (torch.bfloat16, 16, None),
    ],
    ids=str,
)  # fmt: skip
def test_a_mix_of_rows_agrees_with_the_twin_and_with_every_other_way_to_its_keys(
    dtype: torch.dtype, size: int, window: int | None, device: str
) -> None:
    caches = Caches(MIX, size, dtype, device, index=torch.int64 if size == 8 else torch.int32)
    exact = caches.exact(window=window)
    ways = {(torch.float32, 16): (SMALL,), (torch.bfloat16, 16): (LAGGING,), (torch.float16, 16): (SMALL, LAGGING)}
    for tiles in ways.get((dtype, size), (SMALL,)):
        got = caches.attend(tiles, window=window)
        assert_near(got, exact)
        assert_same(got, caches.attend(tiles, paged=False, window=window), caches.attend(tiles, fresh=True, window=window))


# 14 tiles of 16 keys, for each KV head: rows of one tile and of many, a row that is not asked, one without context.
RAGGED: Mix = [(1, 33), (1, 5), (1, 118), (0, 9), (1, 0), (1, 16)]


@pytest.mark.parametrize(
    ("dtype", "window", "programs", "shares"),
    [(torch.float32, None, 1, 1), (torch.float32, None, 3, 3), (torch.float16, 70, 3, 2), (torch.bfloat16, None, 14, 2)],
    ids=str,
)  # fmt: skip
def test_decode_agrees_however_its_rows_are_cut(dtype: torch.dtype, window: int | None, programs: int, shares: int, device: str) -> None:
    caches = Caches(RAGGED, 16, dtype, device)
    tiles = Tiles(keys=16, warps=4, stages=2, programs=programs, shares=shares, grain=1)
    got = caches.attend(tiles, window=window)
    assert_near(got, caches.exact(window=window))
    assert_same(got, caches.attend(tiles, paged=False, window=window))


def test_many_parts_are_merged_in_rounds_and_shares_serve_layer_after_layer(device: str) -> None:
    parts = 65  # the last goes into the third round alone
    caches = Caches([(1, parts * 16), (1, 20)], 16, torch.float32, device)
    tiles = Tiles(keys=16, warps=4, stages=2, programs=parts + 2, shares=2, grain=1)  # a share is a tile
    learned = torch.linspace(-1.5, 2.5, HEADS, device=device)
    shares = shares_of(caches.query_start, caches.context_len, caches.paged[0], None, tiles)
    before = shares.lines.clone()
    assert shares.lines[1, PARTS] == parts
    got = caches.attend(tiles, shares=shares, sinks=learned)
    assert_near(got, caches.exact(sinks=learned))
    assert torch.equal(shares.lines, before)
    assert_same(got, caches.attend(tiles, shares=shares, sinks=learned))


@given(
    mix=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200)), min_size=1, max_size=7),
    window=st.none() | st.integers(1, 90),
    programs=st.integers(1, 9),
    each=st.integers(1, 3),
    grain=st.integers(1, 4),
)
@settings(max_examples=20, phases=[Phase.explicit, Phase.generate])
def test_shares_are_those_of_the_twin(mix: Mix, window: int | None, programs: int, each: int, grain: int, device: str) -> None:
    query_start = torch.tensor([0, *(queries for queries, _ in mix)], device=device, dtype=torch.int32).cumsum(0)
    context_len = torch.tensor([max(queries, context) for queries, context in mix], device=device, dtype=torch.int32)
    asked = query_start, context_len, window, KV_HEADS, 16, programs, each, grain
    got, exact = decode_shares(*asked).lines, plain_attention.decode_shares(*asked)
    assert got.shape == exact.shape and got[0, IN_ALL] == exact[0, IN_ALL]
    written = slice(1, 1 + int(exact[0, IN_ALL]))
    assert torch.equal(got[written, : ARRIVED + 1], exact[written, : ARRIVED + 1])


LEARNED = torch.linspace(-1.5, 2.5, HEADS)
FEATURES: dict[str, dict[str, Any]] = {
    "soft_cap": {"soft_cap": 1.5},
    "sinks": {"sinks": LEARNED},
    "slopes": {"slopes": LEARNED.abs()},
    "all": {"soft_cap": 2.5, "sinks": LEARNED, "slopes": LEARNED.abs() / 9, "window": 20},
}


@pytest.mark.parametrize("feature", ["all", *(pytest.param(name, marks=pytest.mark.soak) for name in FEATURES if name != "all")])
def test_scores_are_capped_and_sloped_and_sinks_take_their_share(feature: str, device: str) -> None:
    asked = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in FEATURES[feature].items()}
    for dtype, mix in ((torch.float32, [(7, 37), (19, 19)]), (torch.bfloat16, [(1, 120), (1, 30), (1, 0)])):
        caches = Caches(mix, 16, dtype, device)
        got, exact = caches.attend(SMALL, **asked), caches.exact(**asked)
        assert_near(got, exact)
        assert_same(got, caches.attend(SMALL, paged=False, **asked))
        assert (caches.exact()[1] - exact[1]).nan_to_num().abs().max() > 0.1  # the feature shows


@pytest.mark.parametrize(
    ("dim", "dtype"), [(80, torch.float32), *(pytest.param(dim, torch.bfloat16, marks=pytest.mark.soak) for dim in (96, 256))], ids=str
)
def test_head_sizes_beside_the_usual(dim: int, dtype: torch.dtype, device: str) -> None:
    caches = Caches([(7, 37), (1, 300), (18, 18)], 16, dtype, device, dim=dim)
    got = caches.attend(LAGGING)
    assert_near(got, caches.exact())
    assert_same(got, caches.attend(LAGGING, fresh=True), caches.attend(LAGGING, paged=False))


@pytest.mark.parametrize("heads", [2, 10, 40])
def test_groups_of_one_head_of_five_and_of_more_than_a_tile(heads: int, device: str) -> None:
    caches = Caches([(16, 20), (1, 9)], 16, torch.float32, device, heads=heads)  # the 16th query may see whole tiles only
    assert_near(caches.attend(LAGGING), caches.exact())


def test_tiles_chosen_by_default_agree(device: str) -> None:
    mixes: dict[torch.dtype, Mix] = {torch.float32: [(12, 30), (1, 20)], torch.bfloat16: [(70, 80), (1, 70)]}
    for dtype, mix in mixes.items():
        caches = Caches(mix, 16, dtype, device, heads=KV_HEADS * 2)
        got = caches.attend(fresh=True)
        assert_near(got, caches.exact())
        assert_same(got, caches.attend())


def test_no_tokens_are_no_work(device: str) -> None:
    assert Caches([(0, 5)], 16, torch.float32, device).attend()[0].shape == (0, HEADS, DIM)
