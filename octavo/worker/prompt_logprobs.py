"""How likely a model finds the tokens of a prompt.

    positions computed    3  4  5  6          hidden state i says what it expects at i + 1:
    tokens it expects     4  5  6  7          a prompt of 7 tokens has no token 7, so the last one is left to the sampler

Logits are made and ranked a slice at a time: those of a whole chunk would take more memory than the model's weights. What is left
of a slice, and goes to the host, are its rankings. Nothing here waits for a device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.reference.sampling import Ranking
from octavo.messages import PromptPiece, StepPlan
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import Sampling, listed, on_host

SLICE_LOGITS = {"cpu": 2**22, "cuda": 2**25}  # logits in a slice: 16 MiB in four bytes, 64 MiB in two


@dataclass(frozen=True, slots=True)
class PromptRankings:
    """What a piece of a prompt's logprobs is made of, on its way to the host."""

    entry: int
    first: int  # the position of its first token
    count: int  # how many of the best were asked for
    found: list[Ranking]  # of one slice after the other

    def to_host(self) -> "PromptRankings":
        """Returns the same in memory of the host: readable when the device has come this far."""
        return replace(self, found=[on_host(found) for found in self.found])

    def piece(self) -> PromptPiece:
        return self.first, [one for found in self.found for one in listed(found, [self.count] * len(found.ranks))]


@dataclass(frozen=True, slots=True)
class _Asked:
    count: int
    num_prompt: int


class PromptLogprobs:
    """Remembers which rows asked for them."""

    def __init__(self, table: RequestTable, vocab_size: int, sampling: Sampling = ops) -> None:
        self._table = table
        self._sampling = sampling
        self._size = max(SLICE_LOGITS[table.words.device.type] // vocab_size, 1)
        self._asked: dict[int, _Asked] = {}  # row -> by its latest tenant

    def apply(self, plan: StepPlan) -> None:
        """Learns of the rows a plan forks and writes. A sequence that moves takes along what it asked for; a sample that leaves its
        parent begins behind the prompt, and has nothing to tell of it."""
        moved = [self._asked.get(fork.source) if fork.moves else None for fork in plan.row_forks]
        for fork, asked in zip(plan.row_forks, moved):
            self._asked.pop(fork.row, None)
            if asked is not None:
                self._asked[fork.row] = asked
        for write in plan.row_writes:
            self._asked.pop(write.row, None)
            if write.params.prompt_logprobs is not None:
                self._asked[write.row] = _Asked(write.params.prompt_logprobs, write.num_prompt)

    def reached(self, plan: StepPlan) -> bool:
        """Returns whether a plan computes prompt tokens of a row that asked for them."""
        if not self._asked:
            return False
        return any(row in self._asked and start + 1 < self._asked[row].num_prompt for row, start in zip(plan.row, plan.start))

    def rankings(self, hidden: Tensor, plan: StepPlan, logits: Callable[[Tensor], Tensor]) -> list[PromptRankings]:
        """Ranks the prompt tokens each entry reached. hidden: [T, hidden], after the final norm; logits: of hidden states, [N, V]"""
        pieces: list[PromptRankings] = []
        if not self._asked:
            return pieces
        begin = 0
        for entry, (row, start, count) in enumerate(zip(plan.row, plan.start, plan.num_query)):
            if asked := self._asked.get(row):
                reach = min(start + count, asked.num_prompt - 1)
                if start < reach:
                    found = self._in_slices(hidden[begin : begin + reach - start], row, start + 1, asked.count, logits)
                    pieces.append(PromptRankings(entry, start + 1, asked.count, found))
            begin += count
        return pieces

    def _in_slices(self, hidden: Tensor, row: int, first: int, count: int, logits: Callable[[Tensor], Tensor]) -> list[Ranking]:
        targets, size = self._table.token_ids[row, first : first + len(hidden)], self._size
        starts = range(0, len(hidden), size)
        return [self._sampling.rank(logits(hidden[start : start + size]), targets[start : start + size], count) for start in starts]
