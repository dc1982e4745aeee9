"""Drawing a token: argmax of scaled logits plus Gumbel noise, over what min-p, top-k and top-p leave.

Each row is seen as distances from its best token, d = (max - logit) / temperature, and one order: (d, id). Every filter
keeps a beginning of that order, so no filter needs more than the few best tokens, and where it cuts, equal logits go to
the lower id:

    d       0.0   0.3   0.3   1.2   4.0  ...        min-p   exp(-d) >= min_p
    id       17     4    90     2    33  ...        top-k   the first k of those
    kept    |<---------------->|                    top-p   of those, tokens with less than top_p of the mass before them

The `NARROW` best tokens settle almost every row; a row whose cut lies beyond them is ordered as a whole. Masses are
summed as integers, so the sum does not depend on shape, threads or device. The result for a row is a pure function of
that row's arguments.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.reference.philox import LOW32, uniform, uniform_at

NARROW = 1024
ONE = 2**40  # the fixed-point mass of the best token; a vocabulary of 2^22 still sums below 2^63


@dataclass(frozen=True, slots=True)
class Draws:
    """What decides the draw of each row beside its logits, as tensors of length S."""

    temperature: Tensor  # above 0
    top_k: Tensor  # 0 = off
    top_p: Tensor  # 1 = off
    min_p: Tensor  # 0 = off
    noise: Tensor  # [S, 4]: key, key, stream, high
    positions: Tensor  # the absolute position the drawn token will have

    def take(self, index: Tensor | slice) -> "Draws":
        return Draws(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index], self.noise[index], self.positions[index]
        )


@dataclass(frozen=True, slots=True)
class Ranking:
    """Where the id of each row stands, and the best of the row: all that logprobs are made of."""

    chosen: Tensor  # [S]: distance of the id from the best
    ranks: Tensor  # [S], from 1
    totals: Tensor  # [S]: mass of the whole row
    near: Tensor  # [S, count]: distances of the best, in order
    near_ids: Tensor  # [S, count]


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """One id a row. logits: [S, V]; returns [S] int64"""
    logits, vocab = logits.float(), logits.shape[1]
    draws = replace(draws, noise=draws.noise.long() & LOW32, positions=draws.positions.long())  # words of 32 bits have no sign here
    distance = distances(logits, draws.temperature)
    plain = (draws.top_k == 0) & (draws.top_p >= 1) & (draws.min_p <= 0)
    narrow = ~plain & (draws.top_k <= NARROW)
    ids = torch.full_like(plain, -1, dtype=torch.int64)  # -1: not drawn yet
    if plain.any():
        ids[plain] = _draw_plain(distance[plain], draws.take(plain))
    if narrow.any():
        ids[narrow] = _draw_ordered(distance[narrow], draws.take(narrow), min(NARROW, vocab))
    rest = ids < 0
    if rest.any():
        ids[rest] = _draw_ordered(distance[rest], draws.take(rest), vocab)
    return ids


def rank(logits: Tensor, ids: Tensor, count: int) -> Ranking:
    """Where each row's id stands, and the row's `count` best. logits: [S, V]; ids: [S]"""
    distance = distances(logits.float(), torch.ones(len(ids)))  # [S, V]
    chosen = distance.gather(1, ids[:, None].long())  # [S, 1]
    return Ranking(chosen.squeeze(1), (distance < chosen).sum(1) + 1, mass(distance).sum(1), *nearest(distance, count))


def sample(logits: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
    """One id a row, [S] int64, with no filter: argmax at temperature 0, else with noise. noise: [S, 4]; positions: [S]"""
    logits, warm = logits.float(), temperature > 0
    best = logits.argmax(-1)
    if warm.any():
        unused, noise = torch.zeros(int(warm.sum())), noise[warm].long() & LOW32  # words of 32 bits have no sign here
        draws = Draws(temperature[warm], unused, unused, unused, noise, positions[warm].long())
        best[warm] = _draw_plain(distances(logits[warm], draws.temperature), draws)
    return best


def distances(logits: Tensor, temperature: Tensor) -> Tensor:
    """How far each token lies below the best of its row: 0 or more, so no temperature can overflow the best one. [S, V]"""
    limits = torch.finfo(torch.float32)
    scale = temperature.clamp(limits.tiny, limits.max).unsqueeze(-1)
    return (logits.amax(-1, keepdim=True) - logits).div_(scale).abs_()  # zeros of two signs can leave a -0.0


def nearest(distance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best tokens in the order (distance, id), lowest first: (distances, ids), each [S, count], or [S, V] if that is less.

    The bits of a float that is not negative order like the float; with the id below them, no two keys are equal.
    """
    if distance.is_cuda:
        near, order = distance.sort(dim=-1, stable=True)  # equals stay in the order of their ids
        return near[:, :count], order[:, :count]
    ids = torch.arange(distance.shape[1])
    keys = distance.view(torch.int32).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids).numpy()  # [S, V]
    if count < keys.shape[1]:
        keys.partition(count, axis=-1)  # numpy orders integers several times faster than torch
    best = torch.from_numpy(np.sort(keys[:, :count], axis=-1))
    return (best >> 32).to(torch.int32).view(torch.float32), best & LOW32


def mass(distance: Tensor) -> Tensor:
    """exp(-distance) in fixed point, int64."""
    return (torch.exp(-distance) * ONE).to(torch.int64)


def _draw_plain(distance: Tensor, draws: Draws) -> Tensor:
    noise = _gumbel(uniform(draws.noise, draws.positions, distance.shape[1]))
    return noise.sub_(distance).argmax(-1)  # the first of equals is the lower id


def _draw_ordered(distance: Tensor, draws: Draws, width: int) -> Tensor:
    """Draws among the `width` best; -1 for a row whose cut may lie beyond them."""
    near, ids = nearest(distance, width)
    keep = kept(near, distance, draws)
    vocab = distance.shape[1]
    settled = ~keep[:, -1] | (draws.top_k > 0) | (width == vocab)
    reach = max(int(keep.sum(-1).amax()), 1)
    near, ids, keep = near[:, :reach], ids[:, :reach], keep[:, :reach]
    if reach > vocab // 4:  # four tokens share a counter: with this many, the whole vocabulary costs less
        noise = uniform(draws.noise, draws.positions, vocab).gather(1, ids)
    else:
        noise = uniform_at(draws.noise, draws.positions, ids)
    score = _gumbel(noise).sub_(near).masked_fill_(~keep, -torch.inf)
    best = torch.where(score == score.amax(-1, keepdim=True), ids, vocab - 1).amin(-1)  # the lower id of equals
    return torch.where(settled, best, -1)


def kept(near: Tensor, distance: Tensor, draws: Draws) -> Tensor:
    """Which of the ordered tokens pass the filters. near: [S, width]; returns bool [S, width]"""
    floor = (draws.min_p.double() * ONE).to(torch.int64).unsqueeze(-1)
    top_k, top_p = draws.top_k.unsqueeze(-1), draws.top_p.double().unsqueeze(-1)
    masses = mass(near)
    keep = (masses >= floor) & ((torch.arange(near.shape[1], device=near.device) < top_k) | (top_k == 0))
    masses *= keep
    total = masses.sum(-1, keepdim=True)
    unseen = (draws.top_k == 0) & (draws.top_p < 1)  # the mass of these rows may reach past the tokens at hand
    if near.shape[1] < distance.shape[1] and unseen.any():
        everything = mass(distance[unseen])
        total[unseen] = (everything * (everything >= floor[unseen])).sum(-1, keepdim=True)
    before = masses.cumsum(-1) - masses
    keep &= (before < top_p * total) | (top_p >= 1)
    keep[:, 0] = True
    return keep


def _gumbel(noise: Tensor) -> Tensor:
    return noise.log_().neg_().log_().neg_()
