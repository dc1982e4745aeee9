"""How likely a model on a device finds the tokens of a prompt: `worker/prompt_logprobs.py` without waiting for the device.

Logits are made and ranked a slice at a time; what is left of a slice, and goes to the host, are its rankings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from octavo.kernels.ops import rank
from octavo.kernels.reference.sampling import Ranking
from octavo.messages import PromptPiece, StepPlan
from octavo.worker.device_rows import DeviceRows
from octavo.worker.device_sampler import on_host
from octavo.worker.sampler import listed

SLICE_LOGITS = 2**25  # logits in a slice: 64 MiB in two bytes


@dataclass(frozen=True, slots=True)
class PromptRankings:
    """What a piece of a prompt's logprobs is made of, on its way to the host."""

    entry: int
    first: int  # the position of its first token
    count: int  # how many of the best were asked for
    found: list[Ranking]  # of one slice after the other

    def to_host(self) -> "PromptRankings":
        """The same in memory of the host: readable when the device has come this far."""
        return replace(self, found=[on_host(found) for found in self.found])

    def piece(self) -> PromptPiece:
        return self.first, [one for found in self.found for one in listed(found, [self.count] * len(found.ranks))]


@dataclass(frozen=True, slots=True)
class _Asked:
    count: int
    num_prompt: int


class DevicePromptLogprobs:
    """Remembers which rows asked for them."""

    def __init__(self, rows: DeviceRows, vocab_size: int) -> None:
        self._rows = rows
        self._size = max(SLICE_LOGITS // vocab_size, 1)
        self._asked: dict[int, _Asked] = {}  # row -> by its latest tenant

    def apply(self, plan: StepPlan) -> None:
        """Learns of the rows a plan forks and writes; a fork begins at the last token of a prompt, and has nothing left to tell."""
        for fork in plan.row_forks:
            self._asked.pop(fork.row, None)
        for write in plan.row_writes:
            self._asked.pop(write.row, None)
            if write.params.prompt_logprobs is not None:
                self._asked[write.row] = _Asked(write.params.prompt_logprobs, write.num_prompt)

    def reached(self, plan: StepPlan) -> bool:
        """Whether it computes prompt tokens of a row that asked for them."""
        return any(row in self._asked and start + 1 < self._asked[row].num_prompt for row, start in zip(plan.row, plan.start))

    def rankings(self, hidden: Tensor, plan: StepPlan, logits: Callable[[Tensor], Tensor]) -> list[PromptRankings]:
        """Of the prompt tokens each entry reached. hidden: [T, hidden], after the final norm; logits: of hidden states, [N, V]"""
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
        targets = self._rows.token_ids[row, first : first + len(hidden)]
        size = self._size
        return [
            rank(logits(hidden[start : start + size]), targets[start : start + size], count) for start in range(0, len(hidden), size)
        ]
