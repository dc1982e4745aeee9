"""The experts of each token: `choose_experts` selects them and their weights, `sort_by_expert` puts their rows next to each other."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.reference.layer import TINY
from octavo.kernels.triton.pdl import begin, use_pdl, wait

LOWEST = tl.constexpr(-3.0e38)
LEAST = tl.constexpr(TINY)
AT_ONCE = 2048  # choices
TILES = tl.constexpr(64)  # written at once

Stack = Tensor | DeviceCodes  # the matrices of all experts, one below the other


@dataclass(frozen=True, slots=True)
class Choices:
    ids: Tensor  # [T, chosen]
    weights: Tensor  # [T, chosen] float32
    count: int  # experts in the stack
    first: int  # the number of the first of them

    @property
    def chosen(self) -> int:
        return self.ids.shape[1]


# -- choices: a program has the logits of one token
#
# It takes the largest logit repeatedly, the first one in a tie. A softmax over all experts whose chosen weights are then normalised
# to a sum of 1 equals a softmax over the chosen ones.


@triton.jit
def route(
    logits,
    ids,
    weights,
    COUNT: tl.constexpr,
    COUNT_TILE: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_TILE: tl.constexpr,
    OVER_ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, COUNT_TILE), tl.arange(0, CHOSEN_TILE)
    wait(PDL)
    left = tl.load(logits + token * COUNT + expert, mask=expert < COUNT, other=float("-inf")).to(tl.float32)
    left = tl.where(expert < COUNT, tl.maximum(left, LOWEST), float("-inf"))  # removes NaN, and excludes what follows the last expert
    largest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - largest), 0)
    chosen, found = tl.zeros([CHOSEN_TILE], tl.int64), tl.full([CHOSEN_TILE], float("-inf"), tl.float32)
    for index in tl.static_range(CHOSEN):
        best, one = tl.max(left, 0, return_indices=True)
        chosen = tl.where(place == index, one, chosen)
        found = tl.where(place == index, best, found)
        left = tl.where(expert == one, float("-inf"), left)
    shares = tl.exp(found - largest)
    shares /= total if OVER_ALL else tl.sum(shares, 0)
    tl.store(ids + token * CHOSEN + place, chosen, mask=place < CHOSEN)
    tl.store(weights + token * CHOSEN + place, shares, mask=place < CHOSEN)


def choose_experts(logits: Tensor, chosen: int, scores: str, normed: bool) -> tuple[Tensor, Tensor]:
    """(the experts of each token [T, chosen] int64, the best first; their weights [T, chosen] float32). logits: [T, count]"""
    tokens, count = logits.shape
    assert logits.is_contiguous() and chosen <= count
    ids = torch.empty(tokens, chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    tile = triton.next_power_of_2(count)
    if tokens:
        route[(tokens,)](
            logits, ids, weights, COUNT=count, COUNT_TILE=tile, CHOSEN=chosen, CHOSEN_TILE=triton.next_power_of_2(chosen),
            OVER_ALL=scores == "all" and not normed, PDL=use_pdl(), num_warps=1 if tile <= 256 else 4, launch_pdl=use_pdl(),
        )  # fmt: skip
    return ids, weights


# -- the same among experts in groups, whose scores a bias corrects: only the experts of the best groups take part


@triton.jit
def keep_best_groups(
    left, expert, COUNT: tl.constexpr, GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, TWO: tl.constexpr
):  # fmt: skip
    """`left` [COUNT_TILE] with -inf outside the best groups. TWO: the score of a group is the sum of its best two, else its best one."""
    own, group = expert // (COUNT // GROUPS), tl.arange(0, GROUPS_TILE)
    scores, kept = tl.full([GROUPS_TILE], float("-inf"), tl.float32), expert < 0
    for number in range(GROUPS):
        inside = tl.where(own == number, left, float("-inf"))
        score, best = tl.max(inside, 0, return_indices=True)
        if TWO:
            score += tl.max(tl.where(expert == best, float("-inf"), inside), 0)
        scores = tl.where(group == number, score, scores)
    for _ in range(CHOSEN_GROUPS):
        best = tl.max(scores, 0, return_indices=True)[1]
        kept |= own == best
        scores = tl.where(group == best, float("-inf"), scores)
    return tl.where(kept, left, float("-inf"))


@triton.jit
def route_in_groups(
    logits,
    bias,
    ids,
    weights,
    scale,
    COUNT: tl.constexpr,
    COUNT_TILE: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_TILE: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, COUNT_TILE), tl.arange(0, CHOSEN_TILE)
    there = expert < COUNT
    correction = tl.load(bias + expert, mask=there, other=0.0) if BIASED else 0.0
    wait(PDL)
    given = tl.load(logits + token * COUNT + expert, mask=there, other=LOWEST).to(tl.float32)
    given = tl.maximum(given, LOWEST)  # removes NaN
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-given))
    else:
        scores = tl.where(there, tl.exp(given - tl.max(given, 0)), 0.0)
        scores /= tl.sum(scores, 0)
    left = tl.where(there, scores + correction, float("-inf"))
    if CHOSEN_GROUPS < GROUPS:
        left = keep_best_groups(left, expert, COUNT, GROUPS, GROUPS_TILE, CHOSEN_GROUPS, SIGMOID)
    chosen, found = tl.zeros([CHOSEN_TILE], tl.int64), tl.zeros([CHOSEN_TILE], tl.float32)
    for index in tl.static_range(CHOSEN):
        best = tl.max(left, 0, return_indices=True)[1]
        chosen = tl.where(place == index, best, chosen)
        found = tl.where(place == index, tl.sum(tl.where(expert == best, scores, 0.0), 0), found)
        left = tl.where(expert == best, float("-inf"), left)
    if NORMED:
        found /= tl.sum(found, 0) + LEAST
    tl.store(ids + token * CHOSEN + place, chosen, mask=place < CHOSEN)
    tl.store(weights + token * CHOSEN + place, found * scale, mask=place < CHOSEN)


def choose_in_groups(
    logits: Tensor,  # [T, count]
    chosen: int,
    scores: str,
    normed: bool,
    groups: int,
    chosen_groups: int,
    bias: Tensor | None,  # [count] float32
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Like `choose_experts`, but only among the experts of the best groups, and with weights times `scale`."""
    tokens, count = logits.shape
    assert logits.is_contiguous() and chosen <= chosen_groups * (count // groups) and count % groups == 0
    ids = torch.empty(tokens, chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    tile = triton.next_power_of_2(count)
    if tokens:
        route_in_groups[(tokens,)](
            logits, bias, ids, weights, scale, COUNT=count, COUNT_TILE=tile, CHOSEN=chosen, CHOSEN_TILE=triton.next_power_of_2(chosen),
            GROUPS=groups, GROUPS_TILE=triton.next_power_of_2(groups), CHOSEN_GROUPS=chosen_groups, SIGMOID=scores == "sigmoid",
            BIASED=bias is not None, NORMED=normed, PDL=use_pdl(), num_warps=1 if tile <= 256 else 4, launch_pdl=use_pdl(),
        )  # fmt: skip
    return ids, weights


# -- sorting the choices of all tokens by expert, so that products can process whole tiles of rows with one matrix
#
#     ids of tokens 0 1 2      3 1 | 3 0 | 1 3            a choice is a number: token * chosen + its index among the token's choices
#     order, tiles of 2        3 . | 1 4 | 0 2 | 5 .      of expert 0, 1, 3, 3; . is padding, a number after the last choice
#     experts of tiles         0     1     3     3
#
# The program of each expert counts all choices by itself, which takes no longer than if one program did it, and then writes its own
# choices after those of all earlier experts. Nothing waits for the host: sizes are bounds, and the number of tiles stays on the device.


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
