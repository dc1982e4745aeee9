"""The logprobs of prompt tokens.

    positions computed    3  4  5  6          hidden state i predicts the token at i + 1:
    tokens predicted      4  5  6  7          a prompt of 7 tokens has no token 7, so the last one is left to the sampler

Logits are computed and ranked in slices: those of a whole chunk would need more memory than the model's weights. Only the rankings
of a slice are kept and copied to the host. Nothing here waits for a device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.reference.sampling import Ranking
from octavo.messages import PromptPiece, StepPlan
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import Sampling, listed, on_host

SLICE_LOGITS = {"cpu": 2**22, "cuda": 2**25}  # logits in a slice: 16 MiB with four bytes each, 64 MiB with two


@dataclass(frozen=True, slots=True)
class PromptRankings:
    """The rankings of a piece of a prompt, from which logprobs are computed on the host."""

    entry: int
    first: int  # the position of its first token
    count: int  # how many of the best were requested
    found: list[Ranking]  # one per slice

    def to_host(self) -> "PromptRankings":
        """Returns a copy in host memory, which is readable when the device has reached this point."""
        return replace(self, found=[on_host(found) for found in self.found])

    def piece(self) -> PromptPiece:
        return self.first, [one for found in self.found for one in listed(found, [self.count] * len(found.ranks))]


@dataclass(frozen=True, slots=True)
class _Requested:
    count: int
    num_prompt: int


class PromptLogprobs:
    """Tracks which rows requested prompt logprobs."""

    def __init__(self, table: RequestTable, vocab_size: int, sampling: Sampling = ops) -> None:
        self._table = table
        self._sampling = sampling
        self._size = max(SLICE_LOGITS[table.words.device.type] // vocab_size, 1)
        self.rows: dict[int, _Requested] = {}  # row -> what its current owner requested, if it did

    def apply(self, plan: StepPlan) -> None:
        """Processes the rows that a plan forks and writes. A sequence that moves keeps its request; a fork starts after the prompt and
        has no prompt logprobs."""
        moved = [self.rows.get(fork.source) if fork.moves else None for fork in plan.row_forks]
        for fork, requested in zip(plan.row_forks, moved):
            self.rows.pop(fork.row, None)
            if requested is not None:
                self.rows[fork.row] = requested
        for write in plan.row_writes:
            self.rows.pop(write.row, None)
            if write.params.prompt_logprobs is not None:
                self.rows[write.row] = _Requested(write.params.prompt_logprobs, write.num_prompt)

    def reached(self, plan: StepPlan) -> bool:
        """Returns whether a plan computes prompt tokens of a row that requested their logprobs."""
        return any(row in self.rows and start + 1 < self.rows[row].num_prompt for row, start in zip(plan.row, plan.start))

    def rankings(self, hidden: Tensor, plan: StepPlan, logits: Callable[[Tensor], Tensor]) -> list[PromptRankings]:
        """Ranks the prompt tokens that each scheduled row reached. hidden: [T, hidden], after the final norm; logits: function to [N, V]"""
        pieces: list[PromptRankings] = []
        begin = 0
        for entry, (row, start, count) in enumerate(zip(plan.row, plan.start, plan.num_query)):
            if requested := self.rows.get(row):
                reach = min(start + count, requested.num_prompt - 1)
                if start < reach:
                    found = self._in_slices(hidden[begin : begin + reach - start], row, start + 1, requested.count, logits)
                    pieces.append(PromptRankings(entry, start + 1, requested.count, found))
            begin += count
        return pieces

    def _in_slices(self, hidden: Tensor, row: int, first: int, count: int, logits: Callable[[Tensor], Tensor]) -> list[Ranking]:
        targets, size = self._table.token_ids[row, first : first + len(hidden)], self._size
        starts = range(0, len(hidden), size)
        return [self._sampling.rank(logits(hidden[start : start + size]), targets[start : start + size], count) for start in starts]
