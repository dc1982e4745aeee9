"""Selects the experts of a token and their weights: a program has the logits of one token.

It takes the largest logit repeatedly, the first one in a tie. A softmax over all experts whose chosen weights are then normalised
to a sum of 1 equals a softmax over the chosen ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.pdl import begin, use_pdl, wait

LOWEST = tl.constexpr(-3.0e38)


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
