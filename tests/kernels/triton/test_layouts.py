"""A cache in either layout holds the same and gives the same, bit for bit: kernels and their twins."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.cache_layout import Layout, empty_cache, tokens_together
from octavo.kernels.reference import attention as plain_attention
from octavo.kernels.triton.attention import fused_decode
from octavo.kernels.triton.attention import paged_attention as attention
from octavo.kernels.triton.attention.tiles import Tiles
from octavo.kernels.triton.step import cache as step_cache

DIM = 16
SMALL = Tiles(keys=16, warps=4, stages=2, queries=32)
KERNELS = SimpleNamespace(write=step_cache, copy=step_cache, attend=attention, few=fused_decode, options={"tiles": SMALL})
TWINS = SimpleNamespace(write=plain_attention, copy=plain_attention, attend=plain_attention, few=plain_attention, options={})

CASES = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 20), min_size=1, max_size=2),
        "size": st.sampled_from([1, 2, 8, 16]),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "seed": st.integers(0, 99),
    }
)


class Story:
    """Prompts are written, a block is copied, prompts are read, then rows decode: all that touches a cache."""

    def __init__(self, kernels: SimpleNamespace, case: dict[str, Any], layout: Layout, device: str) -> None:
        self.kernels, self.case, self.device = kernels, case, device
        self.generator = torch.Generator().manual_seed(case["seed"])
        self.rows, self.size, self.kv_heads = len(case["lengths"]), case["size"], case["kv_heads"]
        width = -(-(max(case["lengths"]) + 1) // self.size)
        self.tables = (torch.randperm(self.rows * width, generator=self.generator) + 1).view(self.rows, width).int().to(device)
        shape = self.rows * width + 2, self.size, self.kv_heads, DIM
        self.caches = [empty_cache(layout, shape, case["dtype"], torch.device(device)).fill_(7) for _ in "kv"]
        angle = torch.outer(torch.arange(64.0), 1e4 ** -(torch.arange(DIM // 2) / (DIM // 2))).to(device)
        self.turns = angle.cos(), angle.sin()

    def tell(self) -> list[Tensor]:
        lengths = torch.tensor(self.case["lengths"])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(self.device)
        positions = torch.cat([torch.arange(length) for length in self.case["lengths"]]).to(self.device)
        row = torch.arange(self.rows).repeat_interleave(lengths).to(self.device)
        q = self.kernels.write.write_kv(self.qkv(len(row)), None, *self.turns, positions, self.slots(row, positions), *self.caches)
        last, spare = int(self.tables[0, 0]), len(self.caches[0]) - 1
        self.kernels.copy.copy_blocks(self.caches, [(last, spare)])
        self.tables[0, 0] = spare
        out = torch.empty(q.shape, dtype=q.dtype, device=self.device)
        bounds = (max(self.case["lengths"]),) if self.kernels is KERNELS else ()
        rows = self.tables, starts, lengths.int().to(self.device)
        read = self.kernels.attend.paged_attention(q, *self.caches, *rows, 0.25, out, *bounds, **self.kernels.options)
        return [read, *self.decode(lengths.to(self.device)), *self.caches]

    def decode(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.slots(torch.arange(self.rows, device=self.device), lengths)
        parts: tuple[Tensor, Tensor] = self.kernels.few.decode_attention_parts(
            self.qkv(self.rows), None, *self.turns, lengths, slots, self.tables, lengths + 1, *self.caches, 0.25, splits=1
        )
        return parts

    def slots(self, row: Tensor, position: Tensor) -> Tensor:
        return self.tables[row, position // self.size].long() * self.size + position % self.size

    def qkv(self, tokens: int) -> Tensor:
        heads = self.kv_heads * (self.case["group"] + 2)
        return torch.randn(tokens, heads * DIM, generator=self.generator).to(self.device, self.case["dtype"])


@pytest.mark.parametrize("kernels", [KERNELS, TWINS], ids=["kernels", "twins"])
def test_layouts_are_equal_bit_for_bit(kernels: SimpleNamespace, device: str) -> None:
    device = "cpu" if kernels is TWINS else device  # the twins' copy of blocks is for the host alone

    @settings(max_examples=1 if device == "cpu" else 40)
    @given(CASES)
    @example({"lengths": [19, 9], "size": 8, "kv_heads": 2, "group": 3, "dtype": torch.bfloat16, "seed": 1})
    def told_twice(case: dict[str, Any]) -> None:
        nhd, hnd = (Story(kernels, case, layout, device) for layout in ("nhd", "hnd"))
        apart = case["size"] > 1 and case["kv_heads"] > 1
        assert tokens_together(nhd.caches[0]) == 1 and tokens_together(hnd.caches[0]) == (case["size"] if apart else 1)
        assert all(map(torch.equal, nhd.tell(), hnd.tell()))

    told_twice()


def test_a_layout_that_is_none_is_no_cache() -> None:
    with pytest.raises(AssertionError, match="a cache of strides"):
        tokens_together(torch.empty(4, 8, 2, 16).transpose(0, 1))
