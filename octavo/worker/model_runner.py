"""`ModelRunner`: executes plans with a program, without ever waiting for a device.

    forward   block copies, row updates and scheduled rows are sent to the device; the step is launched
    sample    rows that need the full sampler are resampled; the copy to the host starts here, and only `Pending.result()` blocks

Meanwhile the host plans the next step. Plans run in order, so the next plan may reuse what a plan frees. On a CPU all work is done
when a call returns.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.ops import copy_blocks
from octavo.messages import NoiseKey, RowFork, StepPlan, StepResult
from octavo.policy.block_pool import NULL_BLOCK
from octavo.worker.executor import Masks, num_drafts, row_masks
from octavo.worker.faults import Faults
from octavo.worker.kv_store import KVStore
from octavo.worker.program import Forward, Program
from octavo.worker.prompt_logprobs import PromptLogprobs, PromptRankings
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import NO_RANKINGS, Rankings, Sampler, Sampling


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
        copy_blocks([buffer for cache in self.store.caches for buffer in cache.values()], [(NULL_BLOCK, NULL_BLOCK)])
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
    pieces: list[PromptRankings]
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
