"""Attention whose scores are capped, or shared with sinks: the grouped kernel of the CPU against the twin that goes row by row."""

import pytest
import torch

from octavo.kernels.reference import attention
from octavo.kernels.reference.attention import attend, causal_mask, paged_attention


@pytest.mark.parametrize("at_once", [1 << 20, 50], ids=["at once", "in pieces"])
@pytest.mark.parametrize(("soft_cap", "with_sinks"), [(1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize(("num_query", "length", "window"), [(1, 9, None), (9, 9, None), (4, 9, None), (4, 9, 3), (1, 9, 4)])
def test_it_gives_what_the_twin_gives(
    num_query: int, length: int, window: int | None, soft_cap: float | None, with_sinks: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORES", at_once)
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows, heads, kv_heads, dim = 2, 6, 2, 10
    q, k, v = numbers(rows, num_query, heads, dim), numbers(rows, length, kv_heads, dim), numbers(rows, length, kv_heads, dim)
    sinks = numbers(heads) * 2 if with_sinks else None
    context = torch.full((rows,), length)
    mask = None if window is None and num_query == 1 else causal_mask(context, num_query, length, window, torch.float32)
    found = attend(q, k, v, mask, False, 0.8, soft_cap, sinks)
    starts, tables = torch.arange(rows + 1) * num_query, torch.arange(rows)[:, None]
    expected = torch.empty(rows * num_query, heads, dim)
    paged_attention(q.flatten(0, 1), k, v, tables, starts, context, 0.8, expected, window, soft_cap=soft_cap, sinks=sinks)
    assert torch.allclose(found.flatten(0, 1), expected, atol=1e-5)
    plain = attend(q, k, v, mask, False, 0.8)
    assert not torch.allclose(found, plain, atol=1e-2), "the cap or the sinks change something"
