"""What ids were drawn from, ranked: for logprobs of the processed kind, in torch's own operations, which wait for nothing on any device.

    adjusted logits -> over the temperature -> -inf where min-p, top-k or top-p cut -> where the id stands among them

A greedy row has a temperature of 0: nothing is scaled or cut.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from octavo.kernels.reference.sampling import Draws, Ranking, distances, kept, nearest

LOGITS_AT_ONCE = 2**20  # ordering them takes some 45 bytes for each


def rank_drawn(
    scores: Callable[[slice], Tensor],  # adjusted logits of some rows, [n, V]: they are made a few rows at a time
    vocab_size: int,
    draws: Draws,
    ids: Tensor,  # [S]
    filtered: bool,  # whether any row has a filter
    rank: Callable[[Tensor, Tensor], Ranking],
) -> Ranking:
    size = max(LOGITS_AT_ONCE // vocab_size, 1)
    parts = [slice(start, start + size) for start in range(0, len(ids), size)]
    found = [rank(drawn_from(scores(part), draws.take(part), ids[part], filtered), ids[part]) for part in parts]
    return Ranking(*(torch.cat([getattr(one, each.name) for one in found]) for each in fields(Ranking)))


def drawn_from(logits: Tensor, draws: Draws, ids: Tensor, filtered: bool) -> Tensor:
    """As logits, the best of a row 0. [S, V] float32

    The id itself is always within: a kernel that drew it may round a mass otherwise where a filter ends, and where nothing was
    left to draw from, it is what was left.
    """
    greedy, place = draws.temperature == 0, ids.unsqueeze(1).long()
    distance = distances(logits.float(), torch.where(greedy, 1.0, draws.temperature)).nan_to_num_(torch.inf, torch.inf)
    chosen = distance.gather(1, place)
    distance.scatter_(1, place, torch.where(chosen < torch.inf, chosen, 0.0))
    if filtered:
        filters = {name: torch.where(greedy, off, getattr(draws, name)) for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
        near, order = nearest(distance, distance.shape[1])
        keep = kept(near, distance, replace(draws, **filters))
        cut = torch.empty_like(keep).scatter_(1, order, ~keep).scatter_(1, place, False)
        distance.masked_fill_(cut, torch.inf)
    return distance.neg_()
