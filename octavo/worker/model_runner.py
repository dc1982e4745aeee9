"""`ModelRunner`: executes plans with a program, without ever waiting for a device.

    forward   block copies, row updates and scheduled rows are sent to the device; the step is launched
    sample    rows that need the full sampler are resampled; the copy to the host starts here, and only `Pending.result()` blocks

Meanwhile the host plans the next step. Plans run in order, so the next plan may reuse what a plan frees. On a CPU all work is done
when a call returns.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.reference.sampling import Ranking
from octavo.messages import NoiseKey, PromptPiece, RowFork, StepPlan, StepResult
from octavo.policy.block_pool import NULL_BLOCK
from octavo.worker.executor import Masks, num_drafts, row_masks
from octavo.worker.faults import Faults
from octavo.worker.kv_store import KVStore
from octavo.worker.program import Forward, Program
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import NO_RANKINGS, Rankings, Sampler, Sampling, listed, on_host

SLICE_LOGITS = {"cpu": 2**22, "cuda": 2**25}  # logits in a slice: 16 MiB with four bytes each, 64 MiB with two


class ModelRunner:
    def __init__(
        self, program: Program, sampling: Sampling, store: KVStore, table: RequestTable, faults: Faults | None, processed: bool = False
    ) -> None:
        """`processed`: which kind of logprobs (`worker/sampler.py`)"""
        self.program = program
        self.store = store
        self.table = table
        self.faults = faults
        self.sampler = Sampler(table, program.vocab_size, sampling, processed)
        self.prompts = PromptLogprobs(table, program.vocab_size, sampling)
        self._pieces: list[PromptRankings] = []
        self._plan = StepPlan(0)
        self._forward: Forward | None = None

    @torch.inference_mode()
    def warm_up(self, dtype: torch.dtype) -> None:
        """Calls every function used around steps once, without effect, so that nothing is compiled or loaded later."""
        ops.copy_blocks([buffer for cache in self.store.caches for buffer in cache.values()], [(NULL_BLOCK, NULL_BLOCK)])
        self.table.apply(StepPlan(0, row_forks=[RowFork(0, 0, 0, NoiseKey((0, 0), 0, 0))]))
        self.sampler.warm_up(dtype)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        if self.faults is not None:
            self.faults.before_forward(plan.step)
        self.store.apply(plan)
        self.table.apply(plan)
        self.sampler.apply(plan)
        prompts = self.prompts
        if prompts.rows or any(write.params.prompt_logprobs is not None for write in plan.row_writes):
            prompts.apply(plan)
        whole = prompts.reached(plan) if prompts.rows else False
        self._plan, self._forward, self._pieces = plan, None, []
        if plan.row:
            self._forward = self.program.run(self.program.load(plan), whole)
        if whole and self._forward is not None:
            self._pieces = prompts.rankings(self._forward.hidden, plan, self.program.logits)

    @torch.inference_mode()
    def sample(self, masks: Masks | None = None) -> "Pending":
        plan, forward = self._plan, self._forward
        if forward is None:  # an empty plan, or a later stage samples
            return Pending(plan, torch.empty(0, dtype=torch.int32), {}, NO_RANKINGS, [], [], None)
        ids, masked = forward.result[: plan.first_outputs()[-1]], {} if masks is None else row_masks(plan, masks)
        rankings = self.sampler.sample(forward.logits, plan, ids, masked)
        faults = self.faults
        spoiled = [0] if faults is not None and (faults.poisons(plan.step, 0) or (ids.is_cuda and faults.spoils_id(plan.step))) else []
        if ids.is_cuda:
            host = torch.empty(len(ids), dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
        else:
            numbers = ids.numpy()
            self._refuse_ids_outside(plan, numbers)
            host = torch.from_numpy(numbers.copy())  # a copy by torch takes ten times as long
        pieces = [piece.to_host() for piece in self._pieces]
        drafts = {entry: num_drafts(plan, entry, masked) for entry in plan.drafts}
        pending = Pending(plan, host, drafts, rankings.to_host(), pieces, spoiled, torch.cuda.Event() if ids.is_cuda else None)
        if pending.event is not None:
            pending.event.record()
        return pending

    def _refuse_ids_outside(self, plan: StepPlan, numbers: NDArray[np.int32]) -> None:
        """An id outside the vocabulary must never be fed back: its scheduled row is marked as bad, and the table row gets another id."""
        if self.faults is not None and self.faults.spoils_id(plan.step):
            numbers[0] = self.program.vocab_size
        if numbers.view(np.uint32).max() >= self.program.vocab_size:  # as unsigned numbers, negative ids are the largest
            first = plan.first_outputs()
            for output in np.flatnonzero((numbers < 0) | (numbers >= self.program.vocab_size)).tolist():
                numbers[output] = -1
                entry = bisect_right(first, output) - 1
                if plan.outputs[entry]:
                    row = plan.row[entry]
                    self.table.token_ids[row, int(self.table.num_tokens[row]) - 1] = 0

    def stop(self) -> None:
        """Drops every reference, so that all memory is freed."""
        self.__dict__.clear()


@dataclass(slots=True)
class Pending:
    """A result that is being copied to the host."""

    plan: StepPlan
    ids: Tensor  # [S], in host memory like all the rest
    drafts: dict[int, int]  # scheduled row -> how many of its drafts may be accepted
    rankings: Rankings
    pieces: "list[PromptRankings]"
    spoiled: list[int]  # scheduled rows that tests made bad
    event: torch.cuda.Event | None  # recorded when everything has arrived

    def result(self) -> StepResult:
        if self.event is not None:
            self.event.synchronize()
        plan, ids = self.plan, self.ids.tolist()
        first = plan.first_outputs()
        heads = [ids[output] for output in first[:-1]] if self.drafts else ids
        tokens = [[max(token, 0)] if sampled else [] for token, sampled in zip(heads, plan.outputs)]
        for entry, count in self.drafts.items():
            tokens[entry] = _accepted(plan.drafts[entry][:count], ids[first[entry] :])
        return StepResult(
            plan.step,
            tokens,
            logprobs=self.rankings.logprobs(),
            prompt_logprobs={piece.entry: piece.piece() for piece in self.pieces},
            bad_rows=self.spoiled + sorted({bisect_right(first, output) - 1 for output, token in enumerate(ids) if token < 0}),
        )


def _accepted(drafts: list[int], ids: list[int]) -> list[int]:
    """Returns the ids that `RequestTable.accept` appends. ids: sampled from the outputs of the row, and maybe further ones"""
    count = next((at for at, (draft, token) in enumerate(zip(drafts, ids)) if draft != token), len(drafts))
    return [max(token, 0) for token in ids[: count + 1]]


# -- the logprobs of prompt tokens
#
#     positions computed    3  4  5  6          hidden state i predicts the token at i + 1:
#     tokens predicted      4  5  6  7          a prompt of 7 tokens has no token 7, so the last one is left to the sampler
#
# Logits are computed and ranked in slices: those of a whole chunk would need more memory than the model's weights. Only the rankings of a
# slice are kept and copied to the host. Nothing here waits for a device.


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
