"""Sampling with a sharded vocabulary: each rank reads its part of every row of logits. Ranks exchange candidates, never logits.

    no filter    each rank's best (score, id) of a row; the highest of all wins, and the lower id in a tie
    filters      each rank's nearest tokens, merged in the order (distance, id); probabilities are integers, so sums are exact
    logprobs     each rank counts ranks and probabilities in its part, and the counts are added; processed logprobs first apply the
                 filters, which are determined by the nearest tokens

Noise depends only on token and position, so a rank can sample among its tokens alone. The result equals that of
`kernels/reference/sampling.py` over the whole row, on every rank.
"""

from dataclasses import replace

import torch
from torch import Tensor

from octavo.comm.comm import Comm
from octavo.kernels.reference.philox import LOW32, uniform_at
from octavo.kernels.reference.sampling import (
    NARROW,
    Draws,
    Ranking,
    draw_kept,
    drawn_distances,
    drawn_filters,
    gumbel,
    in_order,
    is_settled,
    kept,
    mass,
    mass_above,
    min_mass,
    nearest,
    scaled,
)
from octavo.models.split import vocabulary_rows

AT_ONCE = 16  # rows on a GPU: the noise of many tokens needs much memory


class RankSampling:
    def __init__(self, comm: Comm, vocab_size: int) -> None:
        self._comm = comm
        self._vocab_size = vocab_size
        self.tokens = vocabulary_rows(vocab_size, comm.size, comm.rank)

    def sample(self, logits: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
        """Returns one id per row, [S] int64, without filters. logits: [S, tokens of this rank]; noise: [S, 4]; positions: [S]"""
        warm = temperature > 0
        if logits.is_cuda:  # a captured step cannot branch on values
            some = zip(*(each.split(AT_ONCE) for each in (warm, logits, temperature, noise, positions)))
            return torch.cat([self._best(torch.where(warm[:, None], self._warm(*rest), rest[0].float())) for warm, *rest in some])
        scores = logits.float().clone()
        if warm.any():
            scores[warm] = self._warm(logits[warm], temperature[warm], noise[warm], positions[warm])
        return self._best(scores)

    def _warm(self, logits: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
        """Returns scores with noise; the highest score is sampled."""
        unused = torch.zeros_like(temperature)
        draws = Draws(temperature, unused, unused, unused, noise.long() & LOW32, positions.long())
        return self._noise(draws).sub_(self._distances(logits.float(), temperature))

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Returns one id per row, [S] int64."""
        draws = replace(draws, noise=draws.noise.long() & LOW32, positions=draws.positions.long())
        distance = self._distances(logits.float(), draws.temperature)
        plain = (draws.top_k == 0) & (draws.top_p >= 1) & (draws.min_p <= 0)
        narrow = ~plain & (draws.top_k <= NARROW)
        ids = torch.full_like(plain, -1, dtype=torch.int64)  # -1: not sampled yet
        if plain.any():
            ids[plain] = self._best(self._noise(draws.take(plain)).sub_(distance[plain]))
        if narrow.any():
            ids[narrow] = self._draw_ordered(distance[narrow], draws.take(narrow), min(NARROW, self._vocab_size))
        rest = ids < 0
        if rest.any():
            ids[rest] = self._draw_ordered(distance[rest], draws.take(rest), self._vocab_size)
        return ids

    def rank(self, logits: Tensor, ids: Tensor, count: int) -> Ranking:
        """Returns the rank of each row's id, and the row's `count` best."""
        distance = self._distances(logits.float(), torch.ones(len(ids), device=logits.device))
        index, mine = self._own_place(ids)
        own = distance.gather(1, index).masked_fill(~mine, torch.inf)
        chosen = self._comm.all_gather(own).amin(1, keepdim=True)  # only one rank has it
        ranks = self._sum((distance < chosen).sum(1, keepdim=True)) + 1
        near, near_ids = self._nearest(distance, count)
        return Ranking(chosen.squeeze(1), ranks, self._sum(mass(distance).sum(1, keepdim=True)), near, near_ids)

    def drawn_from(self, logits: Tensor, draws: Draws, ids: Tensor, filtered: bool) -> Tensor:
        """Returns this rank's part of the distribution each id was sampled from (the reference's `drawn_from` has the whole)."""
        distance = drawn_distances(self._distances, logits, draws)
        index, mine = self._own_place(ids)
        at = distance.gather(1, index)
        distance.scatter_(1, index, torch.where(mine & (at == torch.inf), 0.0, at))
        if filtered:
            keep = self._kept(distance, drawn_filters(draws))
            keep.scatter_(1, index, keep.gather(1, index) | mine)
            distance.masked_fill_(~keep, torch.inf)
        return distance.neg_()

    def whole(self, logits: Tensor) -> Tensor:
        """Returns rows of full vocabulary width. The logits of other ranks are -inf, which no edit of a row changes."""
        rows = torch.full((len(logits), self._vocab_size), -torch.inf, device=logits.device)
        rows[:, self.tokens.start : self.tokens.stop] = logits
        return rows

    def own(self, logits: Tensor) -> Tensor:
        """Returns this rank's part of rows of full vocabulary width."""
        return logits[:, self.tokens.start : self.tokens.stop]

    def _own_place(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the index of each id in this rank's part, and whether it is there; otherwise some valid index. ids: [S]; each [S, 1]"""
        index = ids[:, None].long() - self.tokens.start
        return index.clamp(0, len(self.tokens) - 1), (index >= 0) & (index < len(self.tokens))

    def _distances(self, logits: Tensor, temperature: Tensor) -> Tensor:
        best = self._comm.all_gather(logits.amax(-1, keepdim=True)).amax(-1, keepdim=True)
        return scaled(best - logits, temperature)

    def _noise(self, draws: Draws) -> Tensor:
        ids = torch.arange(self.tokens.start, self.tokens.stop, device=draws.noise.device).expand(len(draws.noise), -1)
        return gumbel(uniform_at(draws.noise, draws.positions, ids))

    def _best(self, scores: Tensor) -> Tensor:
        """Returns the id of the highest score of all ranks, [S]. scores: [S, tokens of this rank]"""
        place = scores.argmax(-1, keepdim=True)  # the first of equals
        values = self._comm.all_gather(scores.gather(1, place))  # [S, ranks]
        ids = self._comm.all_gather(place + self.tokens.start)
        return ids.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)  # the first of equals has the lower ids

    def _nearest(self, distance: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns the best tokens of all ranks in the order (distance, id), each [S, count], or [S, V] if that is less."""
        near, ids = nearest(distance, min(count, len(self.tokens)))
        width = min(count, -(-self._vocab_size // self._comm.size)) - near.shape[1]
        near = torch.nn.functional.pad(near, (0, width), value=torch.inf)  # the last rank may have fewer
        ids = torch.nn.functional.pad(ids + self.tokens.start, (0, width), value=LOW32)
        near, ids = in_order(self._comm.all_gather(near).cpu(), self._comm.all_gather(ids).cpu(), min(count, self._vocab_size))
        return near.to(distance.device), ids.to(distance.device)

    def _sum(self, counts: Tensor) -> Tensor:
        """Returns the sum over all ranks, [S]. counts: [S, 1]"""
        return self._comm.all_gather(counts).sum(1)

    def _draw_ordered(self, distance: Tensor, draws: Draws, width: int) -> Tensor:
        """Samples among the `width` best. Returns -1 for a row whose cutoff may lie beyond them."""
        near, ids = self._nearest(distance, width)
        return draw_kept(near, ids, self._kept_of(near, distance, draws), draws, self._vocab_size)

    def _kept_of(self, near: Tensor, distance: Tensor, draws: Draws) -> Tensor:
        """Returns which of the nearest tokens of all ranks pass the filters."""
        return kept(near, self._vocab_size, lambda *rest: self._sum(mass_above(distance, *rest)).unsqueeze(-1), draws)

    def _kept(self, distance: Tensor, draws: Draws) -> Tensor:
        """Returns which tokens of this rank pass the filters. For min-p alone a rank needs no communication."""
        keep = mass(distance) >= min_mass(draws)
        open_ones = (draws.top_k > 0) | (draws.top_p < 1)  # rows whose cutoff is not known yet
        for width in (min(NARROW, self._vocab_size), self._vocab_size):
            rows = open_ones & ((draws.top_k <= width) | (width == self._vocab_size))
            if rows.any():
                some = draws.take(rows)
                near, ids = self._nearest(distance[rows], width)
                found = self._kept_of(near, distance[rows], some)
                keep[rows] = self._own_marks(ids, found)
                open_ones[rows] = ~is_settled(found, some, self._vocab_size)
        return keep

    def _own_marks(self, ids: Tensor, marks: Tensor) -> Tensor:
        """Selects the marks of this rank's tokens, [S, tokens], from the marks of some tokens of all ranks. ids, marks: [S, n]"""
        index, width = ids - self.tokens.start, len(self.tokens)
        index = torch.where((index >= 0) & (index < width), index, width)  # the extra column is for tokens of other ranks
        return torch.zeros(len(ids), width + 1, dtype=torch.bool, device=ids.device).scatter_(1, index, marks)[:, :width]
