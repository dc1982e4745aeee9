"""`DeviceRunner`: carries out plans on a device without ever waiting for it.

    forward   block copies, row changes and entries go up; the step is launched
    sample    the result starts on its way down; who wants it waits for it, and nobody else

The host plans the next step meanwhile. Plans run in order on one stream, so that what a plan frees the next may use.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.step_tensors import part_words
from octavo.messages import StepPlan, StepResult
from octavo.worker.device_program import DeviceForward, DeviceProgram, Shape
from octavo.worker.device_rows import DeviceRows, Words, send
from octavo.worker.faults import Faults
from octavo.worker.kv_store import KVStore

PADDING = -1  # the row of an entry that stands for no sequence


class RunsSteps(Protocol):
    program: DeviceProgram

    def shape_of(self, entries: int, tokens: int) -> Shape: ...

    def run(self, shape: Shape, max_context: int) -> DeviceForward: ...


class DeviceRunner:
    def __init__(self, steps: RunsSteps, store: KVStore, rows: DeviceRows, faults: Faults) -> None:
        self.steps = steps
        self.store = store
        self.rows = rows
        self.faults = faults
        self._plan = StepPlan(0)
        self._forward: DeviceForward | None = None

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self.faults.before_forward(plan.step)
        self.store.apply(plan)
        self.rows.apply(plan)
        self._plan, self._forward = plan, None
        if plan.row:
            shape = self.steps.shape_of(len(plan.row), sum(plan.num_query))
            send(entries(plan, shape), self.steps.program.memory.entries)
            context = max(start + count for start, count in zip(plan.start, plan.num_query, strict=True))
            self._forward = self.steps.run(shape, context)

    @torch.inference_mode()
    def sample(self) -> "Pending":
        plan, forward = self._plan, self._forward
        if forward is None:
            return Pending(plan, torch.empty(0, dtype=torch.int32), None, [])
        ids = forward.result[: len(plan.row)]
        poisoned = [0] if self.faults.poisons(plan.step, 0) or self.faults.spoils_id(plan.step) else []
        if not ids.is_cuda:
            return Pending(plan, ids.clone(), None, poisoned)
        host, event = torch.empty(len(ids), dtype=ids.dtype, pin_memory=True), torch.cuda.Event()
        host.copy_(ids, non_blocking=True)
        event.record()
        return Pending(plan, host, event, poisoned)


@dataclass(slots=True)
class Pending:
    """A result on its way."""

    plan: StepPlan
    ids: Tensor  # [R], of the host
    event: torch.cuda.Event | None  # when they are there
    bad: list[int]

    def result(self) -> StepResult:
        if self.event is not None:
            self.event.synchronize()
        ids, samples = self.ids.tolist(), self.plan.samples
        tokens = [[max(token, 0)] if sampled else [] for token, sampled in zip(ids, samples)]
        return StepResult(self.plan.step, tokens, bad_rows=self.bad + [entry for entry, token in enumerate(ids) if token < 0])


def entries(plan: StepPlan, shape: Shape) -> Words:
    """The plan as words, padded to a shape: query_start | row | start | samples"""
    count, size = len(plan.row), shape.entries
    words = np.zeros((4, part_words(size)), np.int32)
    query_start, row, start, samples = words
    np.cumsum(plan.num_query, out=query_start[1 : count + 1])
    query_start[count + 1 : size + 1] = query_start[count] + (np.arange(1, size - count + 1) if shape.decodes else 0)
    row[:count], row[count:] = plan.row, PADDING
    start[:count], samples[:count] = plan.start, plan.samples
    return words.ravel()
