"""Samples a token: argmax of scaled logits plus Gumbel noise, over the tokens that pass min-p, top-k and top-p.

A row is converted to distances from its best token, d = (max - logit) / temperature, in one order: (d, id). Every filter keeps a
prefix of that order, so no filter needs more than the few best tokens. If it cuts between equal logits, the lower id stays:

    d       0.0   0.3   0.3   1.2   4.0  ...        min-p   exp(-d) >= min_p
    id       17     4    90     2    33  ...        top-k   the first k of those
    kept    |<---------------->|                    top-p   of those, tokens with less than top_p of the probability before them

The `NARROW` best tokens are enough for almost every row; a row whose cutoff lies beyond them is sorted as a whole. Probabilities are
summed as integers, so the sum does not depend on shape, threads or device. The result for a row is a pure function of
that row's arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.reference.philox import LOW32, uniform, uniform_at
from octavo.step.logit_edits import LogitEdits

NARROW = 1024
ONE = 2**40  # the fixed-point probability of the best token; a vocabulary of 2^22 still sums below 2^63


@dataclass(frozen=True, slots=True)
class Draws:
    """The parameters of the draw of each row besides its logits, as tensors of length S."""

    temperature: Tensor  # above 0
    top_k: Tensor  # 0 = off
    top_p: Tensor  # 1 = off
    min_p: Tensor  # 0 = off
    noise: Tensor  # [S, 4]: key, key, stream, high
    positions: Tensor  # the absolute position of the sampled token

    def take(self, index: Tensor | slice) -> "Draws":
        return Draws(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index], self.noise[index], self.positions[index]
        )


@dataclass(frozen=True, slots=True)
class Ranking:
    """The rank of the id of each row, and the best tokens of the row. Logprobs are computed from this."""

    chosen: Tensor  # [S]: distance of the id from the best
    ranks: Tensor  # [S], from 1
    totals: Tensor  # [S]: total probability of the row, in fixed point
    near: Tensor  # [S, count]: distances of the best, in order
    near_ids: Tensor  # [S, count]


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Returns one id per row, [S] int64. logits: [S, V]"""
    logits, vocab = logits.float(), logits.shape[1]
    draws = replace(draws, noise=draws.noise.long() & LOW32, positions=draws.positions.long())  # as unsigned 32-bit words
    distance = distances(logits, draws.temperature)
    plain = (draws.top_k == 0) & (draws.top_p >= 1) & (draws.min_p <= 0)
    narrow = ~plain & (draws.top_k <= NARROW)
    ids = torch.full_like(plain, -1, dtype=torch.int64)  # -1: not sampled yet
    if plain.any():
        ids[plain] = _draw_plain(distance[plain], draws.take(plain))
    if narrow.any():
        ids[narrow] = _draw_ordered(distance[narrow], draws.take(narrow), min(NARROW, vocab))
    rest = ids < 0
    if rest.any():
        ids[rest] = _draw_ordered(distance[rest], draws.take(rest), vocab)
    return ids


def rank(logits: Tensor, ids: Tensor, count: int) -> Ranking:
    """Returns the rank of each row's id, and the row's `count` best. logits: [S, V]; ids: [S]"""
    distance = distances(logits.float(), torch.ones(len(ids)))  # [S, V]
    chosen = distance.gather(1, ids[:, None].long())  # [S, 1]
    return Ranking(chosen.squeeze(1), (distance < chosen).sum(1) + 1, mass(distance).sum(1), *nearest(distance, count))


def sample(logits: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
    """Returns one id per row, [S] int64, without filters: argmax at temperature 0, else with noise. noise: [S, 4]; positions: [S]"""
    logits, warm = logits.float(), temperature > 0
    best = logits.argmax(-1)
    if warm.any():
        unused, noise = torch.zeros(int(warm.sum())), noise[warm].long() & LOW32  # as unsigned 32-bit words
        draws = Draws(temperature[warm], unused, unused, unused, noise, positions[warm].long())
        best[warm] = _draw_plain(distances(logits[warm], draws.temperature), draws)
    return best


def distances(logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns the distance of each token from the best of its row, [S, V]: 0 or more, so no temperature can overflow the best one."""
    return scaled(logits.amax(-1, keepdim=True) - logits, temperature)


def scaled(below: Tensor, temperature: Tensor) -> Tensor:
    """Divides distances from the best logit by the temperature, in place. below: [S, V]; temperature: [S]"""
    limits = torch.finfo(torch.float32)
    scale = temperature.clamp(limits.tiny, limits.max).unsqueeze(-1)
    return below.div_(scale).abs_()  # zeros of two signs can produce a -0.0


def nearest(distance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the best tokens in the order (distance, id): (distances, ids), each [S, count], or [S, V] if that is less.

    Nonnegative floats have the same order as their bits. With the id in the bits below, all keys are different.
    """
    if distance.is_cuda:
        near, order = distance.sort(dim=-1, stable=True)  # equal distances stay in the order of their ids
        return near[:, :count], order[:, :count]
    return in_order(distance, torch.arange(distance.shape[1]), count)


def in_order(distance: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same on a CPU, for tokens with these ids."""
    keys = distance.view(torch.int32).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids).numpy()  # [S, V]
    if count < keys.shape[1]:
        keys.partition(count, axis=-1)  # numpy sorts integers several times faster than torch
    best = torch.from_numpy(np.sort(keys[:, :count], axis=-1))
    return (best >> 32).to(torch.int32).view(torch.float32), best & LOW32


def mass(distance: Tensor) -> Tensor:
    """Returns exp(-distance) in fixed point, int64."""
    return (torch.exp(-distance) * ONE).to(torch.int64)


def _draw_plain(distance: Tensor, draws: Draws) -> Tensor:
    noise = gumbel(uniform(draws.noise, draws.positions, distance.shape[1]))
    return noise.sub_(distance).argmax(-1)  # the first of equals is the lower id


def _draw_ordered(distance: Tensor, draws: Draws, width: int) -> Tensor:
    """Samples among the `width` best. Returns -1 for a row whose cutoff may lie beyond them."""
    near, ids = nearest(distance, width)
    return draw_kept(near, ids, kept(near, distance.shape[1], partial(mass_above, distance), draws), draws, distance.shape[1])


def draw_kept(near: Tensor, ids: Tensor, keep: Tensor, draws: Draws, vocab: int) -> Tensor:
    """Samples among the sorted tokens that are kept. Returns -1 for a row whose cutoff may lie beyond them. near, ids, keep: [S, width]"""
    settled = is_settled(keep, draws, vocab)
    reach = max(int(keep.sum(-1).amax()), 1)
    near, ids, keep = near[:, :reach], ids[:, :reach], keep[:, :reach]
    if reach > vocab // 4:  # four tokens share a counter: from here on, the whole vocabulary costs less
        noise = uniform(draws.noise, draws.positions, vocab).gather(1, ids)
    else:
        noise = uniform_at(draws.noise, draws.positions, ids)
    score = gumbel(noise).sub_(near).masked_fill_(~keep, -torch.inf)
    best = torch.where(score == score.amax(-1, keepdim=True), ids, vocab - 1).amin(-1)  # the lower id of equals
    return torch.where(settled, best, -1)


def is_settled(keep: Tensor, draws: Draws, vocab: int) -> Tensor:
    """Returns for which rows the cutoff is not beyond the sorted tokens, bool [S]. keep: [S, width]"""
    return ~keep[:, -1] | (draws.top_k > 0) | (keep.shape[1] == vocab)


def min_mass(draws: Draws) -> Tensor:
    """Returns the minimum probability that passes min-p, in fixed point, [S, 1]."""
    return (draws.min_p.double() * ONE).to(torch.int64).unsqueeze(-1)


def kept(near: Tensor, vocab: int, mass_above: Callable[[Tensor, Tensor], Tensor], draws: Draws) -> Tensor:
    """Returns which of the sorted tokens pass the filters, bool [S, width].

    near: [S, width]; `mass_above`: the total of all tokens with at least the probability `floor` [n, 1], in the marked rows [S]: [n, 1]
    """
    floor = min_mass(draws)
    top_k, top_p = draws.top_k.unsqueeze(-1), draws.top_p.double().unsqueeze(-1)
    masses = mass(near)
    keep = (masses >= floor) & ((torch.arange(near.shape[1], device=near.device) < top_k) | (top_k == 0))
    masses *= keep
    total = masses.sum(-1, keepdim=True)
    unseen = (draws.top_k == 0) & (draws.top_p < 1)  # the total of these rows may include tokens beyond the sorted ones
    if near.shape[1] < vocab and unseen.any():
        total[unseen] = mass_above(floor[unseen], unseen)
    before = masses.cumsum(-1) - masses
    keep &= (before < top_p * total) | (top_p >= 1)
    keep[:, 0] = True
    return keep


def mass_above(distance: Tensor, floor: Tensor, rows: Tensor) -> Tensor:
    masses = mass(distance[rows])
    return (masses * (masses >= floor)).sum(-1, keepdim=True)


def gumbel(noise: Tensor) -> Tensor:
    return noise.log_().neg_().log_().neg_()


# -- the logit edits of a request: allowed ids, bans, bias, penalties, in this order
#
# A row may contain a provisional id, which was sampled from the same logits before they were edited. Only the ids before it count.


def edit_logits(
    logits: Tensor,  # [S, V]
    outputs: list[int],  # which rows of logits
    rows: list[int],  # the table row of each
    positions: list[int],  # of the id to sample
    edits: list[LogitEdits],  # the edits of each
    token_ids: Tensor,  # [rows, positions]
    num_prompt: Tensor,  # [rows]
) -> Tensor:
    """Returns the edited logits of these outputs, [len(outputs), V] float32."""
    scores = logits[outputs].float()  # a copy
    for score, row, position, asked in zip(scores, rows, positions, edits, strict=True):
        ids = token_ids[row, :position]
        _edit(score, ids, ids[int(num_prompt[row]) :], asked)
    return scores


def _edit(scores: Tensor, ids: Tensor, output: Tensor, edits: LogitEdits) -> None:
    """Changes scores in place. scores: [V]; ids: prompt and output; output: only the output"""
    if edits.allowed:
        kept = scores[edits.allowed_ids]
        scores.fill_(-torch.inf)
        scores[edits.allowed_ids] = kept
    banned = _word_ends(edits, output) | (edits.end_ids if len(output) < edits.min_tokens else frozenset())
    if banned and (not edits.allowed or not edits.allowed <= banned):  # otherwise nothing would be left
        scores[list(banned)] = -torch.inf
    if len(edits.bias_ids):
        scores[edits.bias_ids] += edits.biases
    if edits.repetition != 1:
        seen = scores[ids]
        scores[ids] = torch.where(seen > 0, seen / edits.repetition, seen * edits.repetition)  # duplicate ids get equal values
    if edits.frequency != 0 or edits.presence != 0:
        met, counts = output.unique(return_counts=True)
        scores[met] -= edits.frequency * counts + edits.presence


def _word_ends(edits: LogitEdits, output: Tensor) -> frozenset[int]:
    """Returns the ids that would complete a bad word: the output ends with all of the word except its last id."""
    tail = output[max(len(output) - edits.longest_word + 1, 0) :].tolist() if edits.longest_word > 1 else []
    words = edits.longer_words.get(tail[-1], ()) if tail else ()
    ends = {word[-1] for word in words if len(word) <= len(tail) + 1 and tail[len(tail) - len(word) + 1 :] == word[:-1]}
    return edits.single_words.union(ends)


# -- processed logprobs: the rank of each id in the distribution it was sampled from; only torch operations, so no device has to wait
#
#     edited logits -> divided by the temperature -> -inf for tokens removed by min-p, top-k or top-p -> rank of the id
#
# A greedy row has temperature 0: nothing is scaled or removed.

LOGITS_AT_ONCE = 2**20  # sorting needs about 45 bytes for each


def rank_drawn(
    scores: Callable[[slice], Tensor],  # adjusted logits of some rows, [n, V], computed a few rows at a time
    vocab_size: int,
    draws: Draws,
    ids: Tensor,  # [S]
    filtered: bool,  # whether any row has a filter
    rank: Callable[[Tensor, Tensor], Ranking],
    cut: Callable[[Tensor, Draws, Tensor, bool], Tensor],  # `drawn_from`, or one rank's part of it
) -> Ranking:
    size = max(LOGITS_AT_ONCE // vocab_size, 1)
    parts = [slice(start, start + size) for start in range(0, len(ids), size)]
    found = [rank(cut(scores(part), draws.take(part), ids[part], filtered), ids[part]) for part in parts]
    return Ranking(*(torch.cat([getattr(one, each.name) for one in found]) for each in fields(Ranking)))


def drawn_from(logits: Tensor, draws: Draws, ids: Tensor, filtered: bool) -> Tensor:
    """Returns the distribution each id was sampled from, as logits [S, V] float32. The best of a row is 0.

    The id itself is never removed. The kernel that sampled it may round differently at the cutoff; and if all ids were banned,
    the sampled id is the only one left.
    """
    place, distance = ids.unsqueeze(1).long(), drawn_distances(distances, logits, draws)
    chosen = distance.gather(1, place)
    distance.scatter_(1, place, torch.where(chosen < torch.inf, chosen, 0.0))
    if filtered:
        near, order = nearest(distance, distance.shape[1])
        keep = kept(near, distance.shape[1], partial(mass_above, distance), drawn_filters(draws))
        cut = torch.empty_like(keep).scatter_(1, order, ~keep).scatter_(1, place, False)
        distance.masked_fill_(cut, torch.inf)
    return distance.neg_()


def drawn_distances(of: Callable[[Tensor, Tensor], Tensor], logits: Tensor, draws: Draws) -> Tensor:
    """Returns distances divided by the temperature, if it is not 0. Those of NaN are infinite. `of`: `distances`"""
    temperature = torch.where(draws.temperature == 0, 1.0, draws.temperature)
    return of(logits.float(), temperature).nan_to_num_(torch.inf, torch.inf)


def drawn_filters(draws: Draws) -> Draws:
    """Returns the filters; those of a greedy row are off."""
    greedy = draws.temperature == 0
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return replace(draws, **{name: torch.where(greedy, value, getattr(draws, name)) for name, value in off.items()})


# -- bit masks from a grammar


def mask_logits(logits: Tensor, words: Tensor) -> Tensor:
    """Returns a copy of logits [n, V] with -inf where an id's bit is not set. words: [n, W] int32, least significant bit first"""
    if logits.is_cuda:
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = ((words.view(torch.uint8).unsqueeze(-1) >> places) & 1).flatten(1)  # [n, 32 * W]
    else:
        bits = torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little"))
    return logits.masked_fill(bits[:, : logits.shape[1]] == 0, -torch.inf)
