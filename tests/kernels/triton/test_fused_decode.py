"""Decode attention of a few rows in one kernel and the product that merges its splits, against their twins."""

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import attention as plain
from octavo.kernels.reference import layer as plain_products
from octavo.kernels.triton.attention.fused_decode import decode_attention_parts
from octavo.kernels.triton.gemv.products import merge_linear, merge_parts
from octavo.kernels.triton.gemv.tiles import GEMV_ROWS, DecodeTiles, decode_tiles

HEADS, KV_HEADS, DIM = 6, 2, 16
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Shares of one tile, then two, then as many as it takes: 90 tokens before the new one are three splits of 32, 200 four of 64.
TILES = DecodeTiles(keys=16, warps=4, splits=4, few_splits=2, least_share=16, long_share=32)


def random(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


class Rows:
    """Rows over a shuffled pool whose slots are NaN where nothing was written, the new tokens' too."""

    def __init__(
        self, lengths: list[int], size: int, dtype: torch.dtype, device: str, dim: int = DIM, rotated: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        width = -(-max(lengths) // size)
        order = (torch.randperm(len(lengths) * width, generator=generator) + 1).view(len(lengths), width)
        # rows lie apart; garbage past the last block
        self.tables = torch.full((len(lengths), width + 3), 10**6, dtype=torch.int32)[:, :width]
        self.caches = [torch.full((len(lengths) * width + 1, size, KV_HEADS, dim), torch.nan) for _ in "kv"]
        self.slots = torch.zeros(len(lengths), dtype=torch.int64)
        for row, length in enumerate(lengths):
            used = -(-length // size)
            self.tables[row, :used] = order[row, :used].int()
            places = ((order[row] * size)[:, None] + torch.arange(size)).flatten()[:length]
            for cache in self.caches if length else ():
                cache.view(-1, KV_HEADS, dim)[places[:-1]] = torch.randn(length - 1, KV_HEADS, dim, generator=generator)
                self.slots[row] = places[-1]
        self.context_len = torch.tensor(lengths, dtype=torch.int32)
        self.positions = (self.context_len - 1).clamp(min=0)
        for name in ("slots", "context_len", "positions"):
            setattr(self, name, getattr(self, name).to(device))
        self.tables = self.tables.to(device) if device != "cpu" else self.tables
        self.caches = [cache.to(device, dtype) for cache in self.caches]
        self.qkv = random(device, dtype, len(lengths), (HEADS + 2 * KV_HEADS) * dim)
        half = dim // 2 if rotated is None else rotated // 2
        angle = torch.outer(torch.arange(float(max(lengths))), 1e4 ** -(torch.arange(half) / max(half, 1))).to(device)
        self.turns = angle.cos(), angle.sin()

    def attend(self, attention: object, norms: object, window: int | None, **chosen: object) -> list[Tensor]:
        """The merged parts and the caches."""
        dim = self.caches[0].shape[-1]
        caches = [cache.clone() for cache in self.caches]
        rows = self.positions, self.slots, self.tables, self.context_len
        parts, parts_lse = attention(self.qkv.clone(), norms, *self.turns, *rows, *caches, dim**-0.5, window, **chosen)  # type: ignore[operator]
        assert parts.dtype == parts_lse.dtype == torch.float32
        merged = plain_products.merge_linear(parts, parts_lse, torch.eye(HEADS * dim, device=parts.device))
        return [merged, *(cache.nan_to_num(nan=77) for cache in caches)]


def assert_near(got: Tensor, exact: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.float(), exact.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "norm", "window"),
    [
        (torch.float32, True, None), (torch.float32, False, 40), (torch.float16, False, 40), (torch.bfloat16, True, 40),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (
            (torch.float32, True, 40), (torch.float32, False, None), (torch.float16, True, None), (torch.bfloat16, False, None)
        )),
    ],
    ids=str,
)  # fmt: skip
def test_the_new_token_is_written_and_seen_once_whatever_the_split(dtype: torch.dtype, norm: bool, window: int | None, device: str) -> None:
    norms = (random(device, dtype, DIM), random(device, dtype, DIM + 1)[1:], 1e-5) if norm else None
    for lengths, size in (([70, 1, 0, 33], 16), ([91, 2, 17], 1), ([201], 8)):
        rows = Rows(lengths, size, dtype, device)
        exact = rows.attend(plain.decode_attention_parts, norms, window, splits=4)
        for got, expected in zip(rows.attend(decode_attention_parts, norms, window, tiles=TILES), exact):
            assert_near(got, expected, TOLERANCE[dtype])


LEARNED = torch.linspace(-1.5, 2.5, HEADS)


@pytest.mark.parametrize(
    ("dim", "rotated", "window", "soft_cap", "sinks"),
    [(16, 16, None, 1.5, True), (48, 48, 40, None, True), (48, 24, None, 2.5, False), (16, 0, None, None, False), (16, 8, 40, 2.5, True)],
    ids=str,
)
def test_caps_sinks_parts_of_a_rotation_and_heads_of_any_size(
    dim: int, rotated: int, window: int | None, soft_cap: float | None, sinks: bool, device: str
) -> None:
    """Sinks count once, in however many splits a context is; the norms' weights are float32."""
    learned = LEARNED.to(device) if sinks else None
    for dtype in (torch.float32, torch.bfloat16):
        norms = random(device, torch.float32, dim), random(device, torch.float32, dim + 1)[1:], 1e-5
        rows = Rows([91, 1, 0, 33], 16, dtype, device, dim, rotated)
        asked = {"soft_cap": soft_cap, "sinks": learned}
        exact = rows.attend(plain.decode_attention_parts, norms, window, splits=4, **asked)
        for got, expected in zip(rows.attend(decode_attention_parts, norms, window, tiles=TILES, **asked), exact):
            assert_near(got, expected, TOLERANCE[dtype])
        without = rows.attend(plain.decode_attention_parts, norms, window, splits=4)
        assert not (soft_cap or sinks) or (exact[0] - without[0]).abs().max() > 0.05  # what was asked for shows


def test_merging_heads_that_are_no_power_of_two(device: str) -> None:
    parts, weight = random(device, torch.float32, 2, 4, 5, 48), random(device, torch.float32, 21, 5 * 48)
    parts_lse = random(device, torch.float32, 2, 4, 5) * 9
    assert_near(merge_parts(parts, parts_lse, torch.float32), plain_products.merge_parts(parts, parts_lse, torch.float32), 1e-5)
    assert_near(merge_linear(parts, parts_lse, weight), plain_products.merge_linear(parts, parts_lse, weight), 2e-5)


def test_tiles_by_rule_agree(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows = Rows([150, 3], 16, dtype, device)
        exact = rows.attend(plain.decode_attention_parts, None, None)
        for got, expected in zip(rows.attend(decode_attention_parts, None, None), exact):
            assert_near(got, expected, TOLERANCE[dtype])


def test_splits_are_few_until_contexts_are_long() -> None:
    def splits(max_context: int) -> int:
        return decode_tiles(torch.bfloat16, 1, max_context, heads=32, kv_heads=8).splits

    assert (splits(1024), splits(2048), splits(8192)) == (4, 8, 16)
    assert splits(131_072) == 16  # no more programs than begin at once
    assert decode_tiles(torch.bfloat16, 1, 1024, heads=16, kv_heads=8).splits == 16  # short queries: cheap to merge
    assert decode_tiles(torch.bfloat16, rows=GEMV_ROWS, max_context=2048).splits == 4


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (torch.float32, 1), (torch.float16, 1), (torch.bfloat16, GEMV_ROWS),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (
            (torch.float32, 3), (torch.float32, GEMV_ROWS), (torch.float16, 3), (torch.float16, GEMV_ROWS), (torch.bfloat16, 1),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_merging_reads_only_splits_that_hold_something(dtype: torch.dtype, rows: int, device: str) -> None:
    for splits in (1, 2, 16):
        parts, weight = random(device, torch.float32, rows, splits, HEADS, DIM), random(device, dtype, 23, HEADS * DIM)[2:]
        parts_lse, bias = random(device, torch.float32, rows, splits, HEADS) * 9, random(device, dtype, 21)
        for row in range(rows):
            filled = (splits - 2 * row) if row < 2 else 0  # the third row is padding
            parts[row, max(filled, 0) :], parts_lse[row, max(filled, 0) :] = torch.nan, -torch.inf
        if splits < 16:
            assert_near(merge_parts(parts, parts_lse, dtype), plain_products.merge_parts(parts, parts_lse, dtype), TOLERANCE[dtype])
        for offset in (bias, None) if splits == 2 else (bias,):
            got = merge_linear(parts, parts_lse, weight, offset)
            assert got.dtype == dtype
            assert_near(got, plain_products.merge_linear(parts, parts_lse, weight, offset), 4 * TOLERANCE[dtype])


def test_more_rows_than_a_few_are_refused(device: str) -> None:
    parts = torch.zeros(GEMV_ROWS + 1, 1, HEADS, DIM, device=device)
    with pytest.raises(AssertionError, match="5 rows, at most 4"):
        merge_linear(parts, parts[..., 0], torch.zeros(4, HEADS * DIM, device=device))
