"""`BeamSearch`: selects the next beams and the answers among all candidates, and decides when to stop. It does not manage memory.

    beams        candidates, best first        next beams (width 2)        new answers
    0  a b       0 c -1.2    1 d -1.5          0 c                         1 end, because it is among the best 2
    1  a x       1 end -1.4  0 e -1.9          1 d

A score is a sum of log-probabilities. Answers are compared by score / length ** length_penalty, where length counts generated tokens.
The rules are those of `transformers`: only the best `width` candidates of a step can become answers, the best `width` unfinished ones
become the next beams, and the search ends when no beam can beat the worst answer. `early_stopping` sets how that is estimated.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from octavo.messages import Beams, FinishReason, TokenLogprobs


class Step(NamedTuple):
    """One token of a beam. Beams with a common beginning share its steps."""

    token: int
    logprobs: TokenLogprobs
    before: "Step | None"


class Candidate(NamedTuple):
    beam: int
    rank: int  # its rank among the candidates of its beam, from 0
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """A finished beam."""

    score: float  # with the length penalty
    last: Step
    finish_reason: FinishReason

    def steps(self) -> list[Step]:
        """Returns its tokens in order."""
        found: list[Step] = []
        step: Step | None = self.last
        while step is not None:
            found.append(step)
            step = step.before
        return found[::-1]


class BeamSearch:
    def __init__(self, beams: Beams, end_ids: frozenset[int], most_tokens: int) -> None:
        """`most_tokens`: the token limit of an answer."""
        self.width = beams.width
        self.length = 0  # generated tokens of every beam
        self.answers: list[BeamAnswer] = []  # the best ones so far, best first
        self._beams = beams
        self._end_ids = end_ids
        self._most_tokens = most_tokens
        self._scores = [0.0]  # of each beam, best first
        self._last: list[Step | None] = [None]

    def choose(self, found: list[TokenLogprobs]) -> list[tuple[int, int]]:
        """Processes the best candidates of each beam. Returns the new beams as (old beam, token), best first; none if the search is over.

        The answers are then in `answers`.
        """
        self.length += 1
        ranked = self._ranked(found)
        self._keep_answers([one for one in ranked[: self.width] if self._ends(one)], found)
        if self.length == self._most_tokens:
            return []
        chosen = [one for one in ranked if not self._ends(one)][: self.width]
        assert len(chosen) == self.width, "too few candidates to go on with"
        self._scores, self._last = [one.score for one in chosen], [self._step(one, found) for one in chosen]
        return [] if self._is_over() else [(one.beam, one.token) for one in chosen]

    def _ranked(self, found: list[TokenLogprobs]) -> list[Candidate]:
        """Returns the candidates of all beams, best first. Ties go to the better beam, then to the better token."""
        candidates = [
            Candidate(beam, rank, token, score + logprob)
            for beam, (score, best) in enumerate(zip(self._scores, found, strict=True))
            for rank, (token, logprob) in enumerate(zip(best.top_ids, best.top_logprobs, strict=True))
        ]
        return sorted(candidates, key=lambda one: -one.score)

    def _ends(self, one: Candidate) -> bool:
        return one.token in self._end_ids or self.length == self._most_tokens

    def _step(self, one: Candidate, found: list[TokenLogprobs]) -> Step:
        best = found[one.beam]
        own = TokenLogprobs(best.top_logprobs[one.rank], one.rank + 1, best.top_ids, best.top_logprobs)
        return Step(one.token, own, self._last[one.beam])

    def _keep_answers(self, ended: list[Candidate], found: list[TokenLogprobs]) -> None:
        for one in ended:
            reason: FinishReason = "stop" if one.token in self._end_ids else "length"
            self.answers.append(BeamAnswer(self._penalised(one.score, self.length), self._step(one, found), reason))
        self.answers = sorted(self.answers, key=lambda answer: -answer.score)[: self.width]

    def _penalised(self, score: float, length: int) -> float:
        return score / math.pow(length, self._beams.length_penalty)

    def _is_over(self) -> bool:
        """Whether no beam can become an answer any more. `early_stopping` sets how optimistic the estimate is."""
        if len(self.answers) < self.width:
            return False
        if self._beams.early_stopping is True:
            return True
        hopes_for_length = self._beams.early_stopping == "never" and self._beams.length_penalty > 0
        length = self._most_tokens if hopes_for_length else self.length
        return self._penalised(self._scores[0], length) <= self.answers[-1].score


def num_candidates(width: int, num_end_ids: int) -> int:
    """Returns how many of a beam's best tokens `choose` needs, so that at least `width` of them are not end tokens."""
    return width + max(width, num_end_ids)
