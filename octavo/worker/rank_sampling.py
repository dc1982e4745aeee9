"""Sampling where ranks share the vocabulary: each reads its own part of every row of logits. They exchange candidates, never logits.

    no filter    each rank's best (score, id) of a row; the highest of all, and of equals the lower id
    filters      each rank's nearest tokens, merged in the order (distance, id); masses are integers, so that sums are exact
    logprobs     each rank counts ranks and masses in its part, and the counts are added

Noise belongs to a token and a position, so a rank can draw for its tokens alone. The result is that of `kernels/reference/sampling.py`
over the whole row, on every rank.
"""

from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.reference.philox import LOW32, uniform_at
from octavo.kernels.reference.sampling import NARROW, Draws, Ranking, draw_kept, gumbel, in_order, kept, mass, nearest, scaled
from octavo.layers.comm import Comm
from octavo.policy.split import vocabulary_rows

AT_ONCE = 16  # rows on a GPU: noise of many tokens takes much memory


class RankSampling:
    def __init__(self, comm: Comm, vocab_size: int) -> None:
        self._comm = comm
        self._vocab_size = vocab_size
        self.tokens = vocabulary_rows(vocab_size, comm.size, comm.rank)

    def sample(self, logits: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
        """Returns one id a row, [S] int64, without a filter. logits: [S, tokens of this rank]; noise: [S, 4]; positions: [S]"""
        warm = temperature > 0
        if logits.is_cuda:  # a step that is captured cannot look at numbers
            some = zip(*(each.split(AT_ONCE) for each in (warm, logits, temperature, noise, positions)))
            return torch.cat([self._best(torch.where(warm[:, None], self._warm(*asked), asked[0].float())) for warm, *asked in some])
        scores = logits.float().clone()
        if warm.any():
            scores[warm] = self._warm(logits[warm], temperature[warm], noise[warm], positions[warm])
        return self._best(scores)

    def _warm(self, logits: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
        """Returns scores with noise, the highest of which is drawn."""
        unused = torch.zeros_like(temperature)
        draws = Draws(temperature, unused, unused, unused, noise.long() & LOW32, positions.long())
        return self._noise(draws).sub_(self._distances(logits.float(), temperature))

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Returns one id a row, [S] int64."""
        draws = replace(draws, noise=draws.noise.long() & LOW32, positions=draws.positions.long())
        distance = self._distances(logits.float(), draws.temperature)
        plain = (draws.top_k == 0) & (draws.top_p >= 1) & (draws.min_p <= 0)
        narrow = ~plain & (draws.top_k <= NARROW)
        ids = torch.full_like(plain, -1, dtype=torch.int64)  # -1: not drawn yet
        if plain.any():
            ids[plain] = self._best(self._noise(draws.take(plain)).sub_(distance[plain]))
        if narrow.any():
            ids[narrow] = self._draw_ordered(distance[narrow], draws.take(narrow), min(NARROW, self._vocab_size))
        rest = ids < 0
        if rest.any():
            ids[rest] = self._draw_ordered(distance[rest], draws.take(rest), self._vocab_size)
        return ids

    def rank(self, logits: Tensor, ids: Tensor, count: int) -> Ranking:
        """Returns where each row's id stands, and the row's `count` best."""
        distance = self._distances(logits.float(), torch.ones(len(ids), device=logits.device))
        index = ids[:, None].long() - self.tokens.start
        mine = (index >= 0) & (index < len(self.tokens))
        own = distance.gather(1, index.clamp(0, len(self.tokens) - 1)).masked_fill(~mine, torch.inf)
        chosen = self._comm.all_gather(own).amin(1, keepdim=True)  # one rank has it
        ranks = self._sum((distance < chosen).sum(1, keepdim=True)) + 1
        near, near_ids = self._nearest(distance, count)
        return Ranking(chosen.squeeze(1), ranks, self._sum(mass(distance).sum(1, keepdim=True)), near, near_ids)

    def whole(self, logits: Tensor) -> Tensor:
        """Returns rows as wide as the vocabulary, without the logits of other ranks: -inf, which no edit of a row changes."""
        rows = torch.full((len(logits), self._vocab_size), -torch.inf, device=logits.device)
        rows[:, self.tokens.start : self.tokens.stop] = logits
        return rows

    def joined(self, logits: Tensor) -> Tensor:
        """Returns rows as wide as the vocabulary with the logits of all ranks. Only logprobs of what was drawn need them."""
        missing = -(-self._vocab_size // self._comm.size) - logits.shape[1]
        return self._comm.all_gather(torch.nn.functional.pad(logits, (0, missing)))[:, : self._vocab_size]

    def own(self, logits: Tensor) -> Tensor:
        """Returns the part of this rank of rows that are as wide as the vocabulary."""
        return logits[:, self.tokens.start : self.tokens.stop]

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
        """Draws among the `width` best. Returns -1 for a row whose cut may lie beyond them."""
        near, ids = self._nearest(distance, width)

        def mass_above(floor: Tensor, rows: Tensor) -> Tensor:
            masses = mass(distance[rows])
            return self._sum((masses * (masses >= floor)).sum(-1, keepdim=True)).unsqueeze(-1)

        keep = kept(near, self._vocab_size, mass_above, draws)
        return draw_kept(near, ids, keep, draws, self._vocab_size)
