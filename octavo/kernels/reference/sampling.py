"""Draws a token: argmax of scaled logits plus Gumbel noise, over what min-p, top-k and top-p leave.

A row becomes distances from its best token, d = (max - logit) / temperature, in one order: (d, id). Every filter keeps the
beginning of that order, so no filter needs more than the few best tokens. If it cuts between equal logits, the lower id stays:

    d       0.0   0.3   0.3   1.2   4.0  ...        min-p   exp(-d) >= min_p
    id       17     4    90     2    33  ...        top-k   the first k of those
    kept    |<---------------->|                    top-p   of those, tokens with less than top_p of the mass before them

The `NARROW` best tokens settle almost every row; a row whose cut lies beyond them is ordered as a whole. Masses are
summed as integers, so the sum does not depend on shape, threads or device. The result for a row is a pure function of
that row's arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.logit_edits import LogitEdits
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
    """Where the id of each row stands, and the best of the row. Logprobs are computed from this."""

    chosen: Tensor  # [S]: distance of the id from the best
    ranks: Tensor  # [S], from 1
    totals: Tensor  # [S]: mass of the whole row
    near: Tensor  # [S, count]: distances of the best, in order
    near_ids: Tensor  # [S, count]


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Returns one id a row, [S] int64. logits: [S, V]"""
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
    """Returns where each row's id stands, and the row's `count` best. logits: [S, V]; ids: [S]"""
    distance = distances(logits.float(), torch.ones(len(ids)))  # [S, V]
    chosen = distance.gather(1, ids[:, None].long())  # [S, 1]
    return Ranking(chosen.squeeze(1), (distance < chosen).sum(1) + 1, mass(distance).sum(1), *nearest(distance, count))


def sample(logits: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
    """Returns one id a row, [S] int64, without a filter: argmax at temperature 0, else with noise. noise: [S, 4]; positions: [S]"""
    logits, warm = logits.float(), temperature > 0
    best = logits.argmax(-1)
    if warm.any():
        unused, noise = torch.zeros(int(warm.sum())), noise[warm].long() & LOW32  # words of 32 bits have no sign here
        draws = Draws(temperature[warm], unused, unused, unused, noise, positions[warm].long())
        best[warm] = _draw_plain(distances(logits[warm], draws.temperature), draws)
    return best


def distances(logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns how far each token lies below the best of its row, [S, V]: 0 or more, so no temperature can overflow the best one."""
    return scaled(logits.amax(-1, keepdim=True) - logits, temperature)


def scaled(below: Tensor, temperature: Tensor) -> Tensor:
    """Returns what logits lack to the best of their row over the temperature, in place. below: [S, V]; temperature: [S]"""
    limits = torch.finfo(torch.float32)
    scale = temperature.clamp(limits.tiny, limits.max).unsqueeze(-1)
    return below.div_(scale).abs_()  # zeros of two signs can leave a -0.0


def nearest(distance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the best tokens in the order (distance, id): (distances, ids), each [S, count], or [S, V] if that is less.

    Floats of 0 or more are in the same order as their bits. With the id in the bits below, no two keys are equal.
    """
    if distance.is_cuda:
        near, order = distance.sort(dim=-1, stable=True)  # equals stay in the order of their ids
        return near[:, :count], order[:, :count]
    return in_order(distance, torch.arange(distance.shape[1]), count)


def in_order(distance: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same on a CPU, for tokens with these ids."""
    keys = distance.view(torch.int32).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids).numpy()  # [S, V]
    if count < keys.shape[1]:
        keys.partition(count, axis=-1)  # numpy orders integers several times faster than torch
    best = torch.from_numpy(np.sort(keys[:, :count], axis=-1))
    return (best >> 32).to(torch.int32).view(torch.float32), best & LOW32


def mass(distance: Tensor) -> Tensor:
    """Returns exp(-distance) in fixed point, int64."""
    return (torch.exp(-distance) * ONE).to(torch.int64)


def _draw_plain(distance: Tensor, draws: Draws) -> Tensor:
    noise = gumbel(uniform(draws.noise, draws.positions, distance.shape[1]))
    return noise.sub_(distance).argmax(-1)  # the first of equals is the lower id


def _draw_ordered(distance: Tensor, draws: Draws, width: int) -> Tensor:
    """Draws among the `width` best. Returns -1 for a row whose cut may lie beyond them."""
    near, ids = nearest(distance, width)
    return draw_kept(near, ids, kept(near, distance.shape[1], partial(mass_above, distance), draws), draws, distance.shape[1])


def draw_kept(near: Tensor, ids: Tensor, keep: Tensor, draws: Draws, vocab: int) -> Tensor:
    """Draws among the ordered tokens that are kept. Returns -1 for a row whose cut may lie beyond them. near, ids, keep: [S, width]"""
    settled = is_settled(keep, draws, vocab)
    reach = max(int(keep.sum(-1).amax()), 1)
    near, ids, keep = near[:, :reach], ids[:, :reach], keep[:, :reach]
    if reach > vocab // 4:  # four tokens share a counter: with this many, the whole vocabulary costs less
        noise = uniform(draws.noise, draws.positions, vocab).gather(1, ids)
    else:
        noise = uniform_at(draws.noise, draws.positions, ids)
    score = gumbel(noise).sub_(near).masked_fill_(~keep, -torch.inf)
    best = torch.where(score == score.amax(-1, keepdim=True), ids, vocab - 1).amin(-1)  # the lower id of equals
    return torch.where(settled, best, -1)


def is_settled(keep: Tensor, draws: Draws, vocab: int) -> Tensor:
    """Returns for which rows the cut is not beyond the ordered tokens, bool [S]. keep: [S, width]"""
    return ~keep[:, -1] | (draws.top_k > 0) | (keep.shape[1] == vocab)


def min_mass(draws: Draws) -> Tensor:
    """Returns the least mass that min-p lets pass, [S, 1]."""
    return (draws.min_p.double() * ONE).to(torch.int64).unsqueeze(-1)


def kept(near: Tensor, vocab: int, mass_above: Callable[[Tensor, Tensor], Tensor], draws: Draws) -> Tensor:
    """Returns which of the ordered tokens pass the filters, bool [S, width].

    near: [S, width]; `mass_above`: of all tokens whose mass is at least the floor [n, 1], in the rows [S] that are marked: [n, 1]
    """
    floor = min_mass(draws)
    top_k, top_p = draws.top_k.unsqueeze(-1), draws.top_p.double().unsqueeze(-1)
    masses = mass(near)
    keep = (masses >= floor) & ((torch.arange(near.shape[1], device=near.device) < top_k) | (top_k == 0))
    masses *= keep
    total = masses.sum(-1, keepdim=True)
    unseen = (draws.top_k == 0) & (draws.top_p < 1)  # the mass of these rows may reach past the tokens at hand
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


# -- what a request asks to be done to its logits: allowed ids, bans, bias, penalties, in this order
#
# A row's newest id is provisional: it was drawn from the same logits before they were edited. Only the ids before it count.


def edit_logits(
    logits: Tensor,  # [P, V]
    entries: list[int],  # which of these
    rows: list[int],  # the row of each
    edits: list[LogitEdits],  # what each asks for
    token_ids: Tensor,  # [rows, positions]
    num_tokens: Tensor,  # [rows], the provisional one among them
    num_prompt: Tensor,  # [rows]
) -> Tensor:
    """Returns the edited logits of the entries, [len(entries), V] float32."""
    scores = logits[entries].float()  # a copy
    for score, row, asked in zip(scores, rows, edits, strict=True):
        ids = token_ids[row, : int(num_tokens[row]) - 1]
        _edit(score, ids, ids[int(num_prompt[row]) :], asked)
    return scores


def _edit(scores: Tensor, ids: Tensor, output: Tensor, edits: LogitEdits) -> None:
    """Changes scores in place. scores: [V]; ids: prompt and output; output: its end alone"""
    if edits.allowed:
        kept = scores[edits.allowed_ids]
        scores.fill_(-torch.inf)
        scores[edits.allowed_ids] = kept
    banned = _word_ends(edits, output) | (edits.end_ids if len(output) < edits.min_tokens else frozenset())
    if banned and (not edits.allowed or not edits.allowed <= banned):  # else nothing would be left
        scores[list(banned)] = -torch.inf
    if len(edits.bias_ids):
        scores[edits.bias_ids] += edits.biases
    if edits.repetition != 1:
        seen = scores[ids]
        scores[ids] = torch.where(seen > 0, seen / edits.repetition, seen * edits.repetition)  # an id met twice is written twice, alike
    if edits.frequency != 0 or edits.presence != 0:
        met, counts = output.unique(return_counts=True)
        scores[met] -= edits.frequency * counts + edits.presence


def _word_ends(edits: LogitEdits, output: Tensor) -> frozenset[int]:
    """Returns the ids that would complete a bad word: all but its last stand at the end of the output."""
    tail = output[max(len(output) - edits.longest_word + 1, 0) :].tolist() if edits.longest_word > 1 else []
    words = edits.longer_words.get(tail[-1], ()) if tail else ()
    ends = {word[-1] for word in words if len(word) <= len(tail) + 1 and tail[len(tail) - len(word) + 1 :] == word[:-1]}
    return edits.single_words.union(ends)


# -- processed logprobs: the rank of each id among the logits it was drawn from; torch's operations alone, so no device has to wait
#
#     edited logits -> over the temperature -> -inf where min-p, top-k or top-p cut -> where the id stands among them
#
# A greedy row has a temperature of 0: nothing is scaled or cut.

LOGITS_AT_ONCE = 2**20  # ordering them takes some 45 bytes for each


def rank_drawn(
    scores: Callable[[slice], Tensor],  # adjusted logits of some rows, [n, V]: they are made a few rows at a time
    vocab_size: int,
    draws: Draws,
    ids: Tensor,  # [S]
    filtered: bool,  # whether any row has a filter
    rank: Callable[[Tensor, Tensor], Ranking],
    cut: Callable[[Tensor, Draws, Tensor, bool], Tensor],  # `drawn_from`, or a rank's part of it
) -> Ranking:
    size = max(LOGITS_AT_ONCE // vocab_size, 1)
    parts = [slice(start, start + size) for start in range(0, len(ids), size)]
    found = [rank(cut(scores(part), draws.take(part), ids[part], filtered), ids[part]) for part in parts]
    return Ranking(*(torch.cat([getattr(one, each.name) for one in found]) for each in fields(Ranking)))


def drawn_from(logits: Tensor, draws: Draws, ids: Tensor, filtered: bool) -> Tensor:
    """Returns what each id was drawn from, as logits [S, V] float32. The best of a row is 0.

    The id itself is never cut. The kernel that drew it may round differently where a filter ends; and if all ids were banned,
    the drawn id is the only one left.
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
    """Returns distances over the temperature, where there is one. Those of no number are infinite. `of`: `distances`"""
    temperature = torch.where(draws.temperature == 0, 1.0, draws.temperature)
    return of(logits.float(), temperature).nan_to_num_(torch.inf, torch.inf)


def drawn_filters(draws: Draws) -> Draws:
    """Returns what is cut: of a greedy row nothing."""
    greedy = draws.temperature == 0
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return replace(draws, **{name: torch.where(greedy, value, getattr(draws, name)) for name, value in off.items()})


# -- masks of bits, from a grammar


def mask_logits(logits: Tensor, words: Tensor) -> Tensor:
    """Returns a copy of logits [n, V] with -inf where an id's bit is not set. words: [n, W] int32, least significant bit first"""
    if logits.is_cuda:
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = ((words.view(torch.uint8).unsqueeze(-1) >> places) & 1).flatten(1)  # [n, 32 * W]
    else:
        bits = torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little"))
    return logits.masked_fill(bits[:, : logits.shape[1]] == 0, -torch.inf)
