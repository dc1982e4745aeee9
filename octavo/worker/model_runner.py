"""`ModelRunner`: carries out a plan with a model. Order: copies, row writes, forward, sample.

    plan (ids) -> rows and cache brought up to date -> ForwardBatch (tensors) -> hidden, logits of sampled rows -> ids

New ids go into the device rows at once; the host learns them from the result.
"""

from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.forward_batch import ForwardBatch
from octavo.messages import PromptPiece, StepPlan, StepResult
from octavo.policy.block_pool import NULL_BLOCK
from octavo.worker.executor import Masks
from octavo.worker.faults import Faults
from octavo.worker.kv_store import KVStore
from octavo.worker.program import Forward, Program
from octavo.worker.prompt_logprobs import prompt_logprobs
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import Sampling, sample


class ModelRunner:
    def __init__(
        self,
        program: Program,
        sampling: Sampling,
        store: KVStore,
        table: RequestTable,
        block_size: int,
        faults: Faults,
        processed: bool = False,  # which logprobs (`worker/sampler.py`)
    ) -> None:
        self.program = program
        self.sampling = sampling
        self.store = store
        self.table = table
        self.block_size = block_size
        self.faults = faults
        self.processed = processed
        self._plan = StepPlan(0)
        self._rows = torch.empty(0)
        self._forward = Forward(torch.empty(0), torch.empty(0))
        self._bad: list[int] = []
        self._prompt_logprobs: dict[int, PromptPiece] = {}

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self.faults.before_forward(plan.step)
        self.store.apply(plan)
        self.table.apply(plan)
        self._plan, self._bad, self._prompt_logprobs = plan, [], {}
        if not plan.row:
            return
        batch = gather(plan, self.table, self.store, self.block_size)
        self._forward = self.program.run(batch)
        if self.faults.poisons(plan.step, 0):
            self._forward.states[: plan.num_query[0]] = torch.nan
        self._bad = _rows_not_finite(self._forward, batch)
        if batch.whole:
            self._prompt_logprobs = prompt_logprobs(self._forward.states, plan, self.table, self.program, self.sampling)
        self._rows = batch.sample_row

    @torch.inference_mode()
    def sample(self, masks: Masks | None = None) -> StepResult:
        plan = self._plan
        tokens: list[list[int]] = [[] for _ in plan.row]
        result = StepResult(plan.step, tokens, prompt_logprobs=self._prompt_logprobs, bad_rows=self._bad)
        entries = [entry for entry, samples in enumerate(plan.samples) if samples]
        if not entries:
            return result
        masked = {} if masks is None else {entries.index(entry): mask for entry, mask in zip(plan.mask_rows, masks, strict=True)}
        sampled = sample(self._forward.logits, self._rows, self.table, self.sampling, self._forward.best, masked, self.processed)
        ids = self._valid_ids(sampled.ids, entries)
        self.table.append(self._rows, ids)
        for entry, token in zip(entries, ids.tolist(), strict=True):
            tokens[entry].append(token)
        result.logprobs = {entries[index]: [found] for index, found in sampled.logprobs.items()}
        return result

    def _valid_ids(self, ids: Tensor, entries: list[int]) -> Tensor:
        """An id outside the vocabulary must never be fed back: its row is bad."""
        vocab_size = self.program.vocab_size
        if self.faults.spoils_id(self._plan.step):
            ids[0] = vocab_size
        numbers = ids.numpy()
        if numbers.min() < 0 or numbers.max() >= vocab_size:
            outside = (ids < 0) | (ids >= vocab_size)
            self._bad += [entries[index] for index in outside.nonzero().flatten().tolist() if entries[index] not in self._bad]
            ids = ids.masked_fill(outside, 0)
        return ids


def gather(plan: StepPlan, table: RequestTable, store: KVStore, block_size: int) -> ForwardBatch:
    """The plan as tensors, read out of the device rows. Made in numpy, which is quicker at small arrays."""
    rows, starts, counts = np.array(plan.row), np.array(plan.start), np.array(plan.num_query)
    query_start = np.concatenate([[0], counts.cumsum()])
    token_rows = rows.repeat(counts)  # [T]
    positions = np.arange(len(token_rows)) + (starts - query_start[:-1]).repeat(counts)
    context_len = starts + counts
    num_blocks = -(-int(context_len.max()) // block_size)
    token_ids, tables = table.token_ids.numpy(), table.tables.numpy()
    row_tables, samples = tables[rows, :num_blocks], np.array(plan.samples)
    tensor = torch.from_numpy
    return ForwardBatch(
        token_ids=tensor(token_ids[token_rows, positions]),
        positions=tensor(positions)[None],
        rows=tensor(rows),
        query_start=tensor(query_start),
        context_len=tensor(context_len),
        tables=tensor(row_tables),
        slots=tensor(tables[token_rows, positions // block_size] * block_size + positions % block_size),
        sample_index=tensor(query_start[1:][samples] - 1),
        sample_row=tensor(rows[samples]),
        caches=store.caches,
        block_size=block_size,
        shared=tensor(_shared_blocks(row_tables) * block_size),
        whole=any(table.params[row].prompt_logprobs is not None for row in plan.row),
    )


def _shared_blocks(tables: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many blocks each row begins with that the row before it begins with, too."""
    same = (tables[1:] == tables[:-1]) & (tables[1:] != NULL_BLOCK)
    return np.concatenate([[0], np.logical_and.accumulate(same, axis=1).sum(axis=1)])


def _rows_not_finite(forward: Forward, batch: ForwardBatch) -> list[int]:
    """Plan entries with a state, of any planned token, that is not finite."""
    tokens = _not_finite(forward.states)
    if forward.sampled is not None:
        tokens = torch.cat([tokens, batch.sample_index[_not_finite(forward.sampled)]])
    return sorted(set((torch.searchsorted(batch.query_start, tokens, right=True) - 1).tolist())) if len(tokens) else []


def _not_finite(states: Tensor) -> Tensor:
    """Which of them have a number that is not."""
    with np.errstate(invalid="ignore"):
        total = states.numpy().sum() if states.dtype == torch.float32 else states.sum()  # numpy is quicker at the few of a decode step
    if isfinite(float(total)):  # as it nearly always is
        return torch.empty(0, dtype=torch.int64)
    return (~states.isfinite().all(dim=1)).nonzero().flatten()
