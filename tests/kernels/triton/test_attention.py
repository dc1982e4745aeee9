"""Paged attention over mixes of rows, against its twin and against itself without blocks; nothing unwritten is ever read."""

from itertools import product

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import paged_attention as plain
from octavo.kernels.triton.attention import paged_attention
from octavo.kernels.triton.attention_tiles import TOKENS_PER_SPLIT, Tiles, decode_splits

HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = DIM**-0.5
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float16", "bfloat16"])

Mix = list[tuple[int, int]]  # a row's queries and its context
# A chunk over a past, decode, a row that is not asked, a whole prompt over several tiles, padding of a graph, two queries, a first token.
MIX: Mix = [(7, 37), (1, 41), (0, 5), (19, 19), (1, 0), (2, 33), (1, 1), (1, 70)]


class Caches:
    """Rows in a shuffled pool of blocks and in regions of their own, with NaN wherever no row has written."""

    def __init__(self, mix: Mix, size: int, dtype: torch.dtype, device: str, heads: int = HEADS, index: torch.dtype = torch.int32) -> None:
        generator = torch.Generator().manual_seed(size)
        length = max(context for _, context in mix)
        width = -(-length // size)
        blocks = torch.randperm(len(mix) * width, generator=generator).view(len(mix), width) + 1
        self.tables = torch.zeros_like(blocks)  # padded with the null block
        self.regions = torch.randperm(len(mix), generator=generator)[:, None]
        self.paged = [torch.full((len(mix) * width + 1, size, KV_HEADS, DIM), torch.nan, dtype=dtype) for _ in "kv"]
        self.contiguous = [torch.full((len(mix), length + 3, KV_HEADS, DIM), torch.nan, dtype=dtype) for _ in "kv"]
        for row, (_, context) in enumerate(mix):
            used = -(-context // size)
            self.tables[row, :used] = blocks[row, :used]
            for paged, contiguous in zip(self.paged, self.contiguous):
                new = torch.randn(context, KV_HEADS, DIM, generator=generator).to(dtype)
                contiguous[self.regions[row, 0], :context] = new
                paged.view(-1, KV_HEADS, DIM)[(blocks[row] * size)[:, None].add(torch.arange(size)).flatten()[:context]] = new
        counts = torch.tensor([queries for queries, _ in mix])
        self.query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        # As in a product qkv: tokens lie apart.
        self.q = torch.randn(int(counts.sum()), heads + 2, DIM, generator=generator).to(dtype).to(device)[:, :heads]
        self.context_len = torch.tensor([context for _, context in mix])
        self.mix = mix
        for name in ("tables", "regions", "query_start", "context_len"):
            setattr(self, name, getattr(self, name).to(device, index))
        self.paged, self.contiguous = ([cache.to(device) for cache in caches] for caches in (self.paged, self.contiguous))

    def attend(
        self, window: int | None = None, tiles: Tiles | None = None, splits: int | None = None, paged: bool = True
    ) -> tuple[Tensor, Tensor]:
        out, lse = self.poison()
        max_query, max_context = (max(part) for part in zip(*self.mix))
        caches, tables = (self.paged, self.tables) if paged else (self.contiguous, self.regions)
        rows = tables, self.query_start, self.context_len
        return paged_attention(self.q, *caches, *rows, SCALE, out, max_query, max_context, window, lse, paged, tiles, splits), lse

    def exact(self, window: int | None = None) -> tuple[Tensor, Tensor]:
        out, lse = self.poison()
        return plain.paged_attention(self.q, *self.paged, self.tables, self.query_start, self.context_len, SCALE, out, window, lse), lse

    def poison(self) -> tuple[Tensor, Tensor]:
        shape = self.q.shape
        out = torch.full(shape, torch.nan, dtype=self.q.dtype, device=self.q.device)
        return out, torch.full(shape[:2], torch.nan, device=self.q.device)


def assert_near(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    tolerance = TOLERANCE[got[0].dtype]
    torch.testing.assert_close(got[0].float(), exact[0].float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[1], exact[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [*((torch.float32, size) for size in (1, 8, 16, 256)), *product((torch.float16, torch.bfloat16), (1, 16))],
    ids=str,
)
def test_a_mix_of_rows_agrees_with_the_twin_and_with_the_contiguous_cache(
    dtype: torch.dtype, size: int, window: int | None, device: str
) -> None:
    caches = Caches(MIX, size, dtype, device, index=torch.int64 if size == 8 else torch.int32)
    small = Tiles(keys=16, warps=4, stages=2, queries=32)
    got = caches.attend(window, small)
    assert_near(got, caches.exact(window))
    assert all(map(torch.equal, got, caches.attend(window, small, paged=False)))


@pytest.mark.parametrize("window", [None, 40])
@DTYPES
def test_decode_in_splits_agrees_also_where_a_split_is_empty(dtype: torch.dtype, window: int | None, device: str) -> None:
    caches = Caches([(1, 70), (1, 5), (1, 0), (0, 9), (1, 33)], 16, dtype, device)
    for splits in (1, 4):
        got = caches.attend(window, splits=splits)
        assert_near(got, caches.exact(window))
        assert all(map(torch.equal, got, caches.attend(window, splits=splits, paged=False)))


@pytest.mark.parametrize("heads", [2, 40])
def test_groups_of_one_head_and_of_more_than_a_tile(heads: int, device: str) -> None:
    caches = Caches([(3, 20), (1, 9)], 16, torch.float32, device, heads=heads)
    assert_near(caches.attend(), caches.exact())


def test_tiles_chosen_by_default_agree(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        caches = Caches([(45, 70), (1, 70)], 16, dtype, device)
        assert_near(caches.attend(), caches.exact())


def test_contexts_are_split_where_rows_are_few_and_only_if_long() -> None:
    assert decode_splits(rows=256, kv_heads=8, max_context=100_000) == 1
    assert decode_splits(rows=1, kv_heads=8, max_context=32_768) == 64
    assert decode_splits(rows=1, kv_heads=8, max_context=TOKENS_PER_SPLIT) == 1
    assert [decode_splits(rows, 8, 8192) for rows in (4, 16, 32, 64)] == [32, 8, 4, 2]
