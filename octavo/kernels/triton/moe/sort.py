"""Sorts the choices of all tokens by expert, so that products can process whole tiles of rows with one matrix.

    ids of tokens 0 1 2      3 1 | 3 0 | 1 3            a choice is a number: token * chosen + its index among the token's choices
    order, tiles of 2        3 . | 1 4 | 0 2 | 5 .      of expert 0, 1, 3, 3; . is padding, a number after the last choice
    experts of tiles         0     1     3     3

The program of each expert counts all choices by itself, which takes no longer than if one program did it, and then writes its own
choices after those of all earlier experts. Nothing waits for the host: sizes are bounds, and the number of tiles stays on the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.pdl import begin, use_pdl, wait

AT_ONCE = 2048  # choices
TILES = tl.constexpr(64)  # written at once


@dataclass(frozen=True, slots=True)
class Sorted:
    order: Tensor  # [tiles * rows] int32
    experts: Tensor  # [tiles] int32
    count: Tensor  # [1] int32: the number of valid tiles; the ones after them are never written
    rows: int  # in a tile

    @property
    def tiles(self) -> int:
        return len(self.experts)


@triton.jit
def experts_at(ids, at, choices, first, COUNT: tl.constexpr):
    """The number in the stack of each choice's expert; COUNT if it is not in the stack."""
    expert = tl.load(ids + at, mask=at < choices, other=-1).to(tl.int32) - first
    return tl.where((at < choices) & (expert >= 0) & (expert < COUNT), expert, COUNT)


@triton.jit(do_not_specialize=["choices", "first"])
def line_up(
    ids,
    order,
    experts,
    count,
    choices,
    first,
    COUNT: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    own = tl.program_id(0)
    number, lane = tl.arange(0, BINS), tl.arange(0, AT_ONCE)
    counts = tl.zeros([BINS], tl.int32)
    wait(PDL)
    for start in range(0, choices, AT_ONCE):
        counts += tl.histogram(experts_at(ids, start + lane, choices, first, COUNT), BINS)
    tiles = tl.where(number < COUNT, (counts + ROWS - 1) // ROWS, 0)
    before = tl.sum(tl.where(number < own, tiles, 0), 0)
    ours = tl.sum(tl.where(number == own, tiles, 0), 0)
    if own == 0:
        tl.store(count, tl.sum(tiles, 0))

    place, listed = order + before * ROWS, 0
    for start in range(0, choices, AT_ONCE):
        mine = (experts_at(ids, start + lane, choices, first, COUNT) == own).to(tl.int32)
        tl.store(place + listed + tl.cumsum(mine, 0) - 1, start + lane, mask=mine > 0)
        listed += tl.sum(mine, 0)
    filling = listed + tl.arange(0, ROWS)
    tl.store(place + filling, choices, mask=filling < ours * ROWS)
    for start in range(0, ours, TILES):
        tile = start + tl.arange(0, TILES)
        tl.store(experts + before + tile, own, mask=tile < ours)


def most_tiles(choices: int, count: int, rows: int) -> int:
    """Returns the maximum number of tiles: as many experts as possible have one choice in a separate tile."""
    alone = min(choices, count)
    return alone + (choices - alone) // rows


def sort_by_expert(ids: Tensor, count: int, first: int, rows: int) -> Sorted:
    """ids [T, chosen]; the stack has `count` experts, from number `first` on"""
    assert ids.is_contiguous()
    tiles = most_tiles(ids.numel(), count, rows)
    order = torch.empty(tiles * rows, dtype=torch.int32, device=ids.device)
    experts = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    number = torch.empty(1, dtype=torch.int32, device=ids.device)
    line_up[(count,)](
        ids, order, experts, number, ids.numel(), first, COUNT=count, BINS=triton.next_power_of_2(count + 1), ROWS=rows,
        AT_ONCE=AT_ONCE, PDL=use_pdl(), num_warps=8, launch_pdl=use_pdl(),
    )  # fmt: skip
    return Sorted(order, experts, number, rows)
