"""Rows sampled as a runner samples them: the step's own draw by temperature, then the sampler."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.messages import RowWrite, StepPlan, TokenLogprobs
from octavo.step.step_tensors import NOISE, NOISE_WORDS, TEMPERATURE, RowLayout
from octavo.worker.executor import Masks
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import Sampler, Sampling

LENGTH = 64


@dataclass(frozen=True)
class Sampled:
    ids: Tensor  # [S]
    logprobs: dict[int, TokenLogprobs]  # index into ids -> where asked for


class Rows:
    """A table with its sampler, and what a step does around them."""

    def __init__(self, num_rows: int, vocab_size: int, sampling: Sampling = ops, processed: bool = False) -> None:
        self.table = RequestTable(num_rows, RowLayout(2, LENGTH), torch.device("cpu"))
        self.sampler = Sampler(self.table, vocab_size, sampling, processed)

    def apply(self, plan: StepPlan) -> None:
        self.table.apply(plan)
        self.sampler.apply(plan)

    def sample(self, logits: Tensor, rows: list[int], masks: Mapping[int, Masks] | None = None) -> Sampled:
        """Every row gets an id. logits: [len(rows), V]; masks: of indices into rows"""
        table, where = self.table, torch.tensor(rows)
        words, lengths = table.words[where], table.num_tokens[where].long()
        noise = words[:, NOISE : NOISE + NOISE_WORDS]
        ids = ops.sample(logits, words[:, TEMPERATURE].clone().view(torch.float32), noise, lengths).int()
        table.token_ids[where, lengths] = ids
        table.num_tokens[where] += 1
        ones = [1] * len(rows)
        plan = StepPlan(0, row=rows, start=(lengths - 1).tolist(), num_query=ones, outputs=ones)
        masked = {index: mask[None] for index, mask in (masks or {}).items()}
        found = self.sampler.sample(logits, plan, ids, masked).to_host().logprobs()
        return Sampled(ids, {index: one for index, (one,) in found.items()})

    def said(self, row: int) -> list[int]:
        return self.table.token_ids[row, : int(self.table.num_tokens[row])].tolist()  # type: ignore[no-any-return]


def sample_rows(
    logits: Tensor, writes: list[RowWrite], sampling: Sampling = ops, masks: Mapping[int, Masks] | None = None, processed: bool = False
) -> Sampled:
    """Samples each of the rows that are written, in their order."""
    rows = Rows(max(write.row for write in writes) + 1, logits.shape[1], sampling, processed)
    rows.apply(StepPlan(0, row_writes=writes))
    return rows.sample(logits, [write.row for write in writes], masks)
