"""Attention over the keys of one rank, against its twin: mixes of rows, and nothing unwritten is ever read."""

import pytest
import torch

from octavo.kernels.cache_layout import Layout, empty_cache
from octavo.kernels.reference import partial_attention as plain
from octavo.kernels.triton.attention.partial_attention import partial_attention
from tests.support.shared_context import Rows, SharedContext

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# A chunk over a past, decode, a row that is not asked, a whole prompt, padding of a graph, two queries, a first token.
MIX: Rows = [(7, 37), (1, 41), (0, 5), (19, 19), (1, 0), (2, 33), (1, 1), (1, 70)]


@pytest.mark.parametrize(
    ("dtype", "size", "ranks", "heads", "window", "layout", "soft_cap"),
    [
        (torch.float32, 2, 3, 6, None, "nhd", None), (torch.float32, 16, 2, 2, 5, "hnd", 1.5), (torch.bfloat16, 8, 2, 6, None, "nhd", None),
        (torch.float16, 16, 4, 6, 9, "hnd", None),
    ],
    ids=str,
)  # fmt: skip
def test_a_mix_of_rows_agrees_with_the_twin_on_every_rank(
    dtype: torch.dtype, size: int, ranks: int, heads: int, window: int | None, layout: Layout, soft_cap: float | None, device: str
) -> None:
    case = SharedContext(MIX, size, ranks, heads, kv_heads=2, dim=16, dtype=dtype).to(device)
    for rank, (k, v) in enumerate(case.parts):
        caches = [empty_cache(layout, cache.shape, dtype, cache.device).copy_(cache) for cache in (k, v)]
        got = partial_attention(case.q, *caches, *case.rows, case.scale, rank, ranks, window, soft_cap)
        exact = plain.partial_attention(case.q, k, v, *case.rows, case.scale, rank, ranks, window, soft_cap=soft_cap)
        torch.testing.assert_close(got[0], exact[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        torch.testing.assert_close(got[1], exact[1], atol=1e-5, rtol=1e-5)
