"""How parts of a softmax over keys are merged by their log-sum-exps, in torch: parts of a row, ranks that share a context, sinks.

A part that has seen no key has the log-sum-exp -inf, and its weight is 0. Kernels that compute with these numbers themselves (C++,
Triton) are compared with them.
"""

import math

import torch
from torch import Tensor

LOWEST = -1e30  # finite, and below any score


def exponentials(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the exponentials of scores [..., keys], their sum, and the log-sum-exp (both [..., 1]). The exponentials replace `scores`.

    They are relative to the largest score. Their sum is at least 1, or 0 if no key is seen.
    """
    largest = scores.amax(-1, keepdim=True).clamp(min=LOWEST)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    return weights, total, largest + total.log()


def part_weights(lse: Tensor) -> Tensor:
    """Returns the weight of each part, from the log-sum-exps of all [..., parts]. If no part has seen a key, all are 0."""
    weights, total, _ = exponentials(lse.clone())
    return weights / total.clamp(min=1)


def log2_weights(lse: Tensor) -> Tensor:
    """Returns the weight of each part, from log-sum-exps in units of log2 [rows, parts, heads]. Parts without keys may have any weight."""
    return torch.softmax(lse.nan_to_num(neginf=LOWEST) * math.log(2), 1)


def merge_two(mixed: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two parts: results [..., head_dim], log-sum-exps [...]. Returns the result and the log-sum-exp of both."""
    total = torch.logaddexp(lse, more_lse)
    old, new = ((part - total.clamp(min=LOWEST)).exp_().unsqueeze(-1) for part in (lse, more_lse))
    return mixed * old + more * new, total


def with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the log-sum-exps with one more score each, which has no value: it reduces all weights equally."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.float())
