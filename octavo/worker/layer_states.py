"""Finds the first layer in which two runs of the same tokens differ: `octavo verify --schedules` uses it after a difference.

Each step is computed natively, in one call, and once more layer by layer, which must give the same bits. Of the second computation the
rows of some text are kept, or compared with those that were kept: in the order of the steps, parts and positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import VerifyError
from octavo.messages import StepPlan
from octavo.step.step_tensors import Shape
from octavo.worker.kv_store import KVStore
from octavo.worker.native_layers import NativeAttention, NativeLayers
from octavo.worker.native_program import NativeProgram
from octavo.worker.program import Forward
from octavo.worker.twice import as_bits, same_bits

LOGITS = "the logits"
NONE = torch.empty(0, dtype=torch.int64)


class TextStates:
    """The states of one text: for each part of the model, a row of numbers for each position."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = torch.tensor(ids, dtype=torch.int32)
        self.complete = False  # set when the text has been computed once: rows are compared from then on
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}  # part -> its rows, and the positions that have one

    def see(self, step: int, part: str, positions: Tensor, rows: Tensor) -> None:
        """positions: [N]; rows: [N, width], which are kept, or compared with those that were kept"""
        if part not in self._kept:
            self._kept[part] = torch.empty(len(self.ids), rows.shape[1]), torch.zeros(len(self.ids), dtype=torch.bool)
        kept, there = self._kept[part]
        if not self.complete:
            kept[positions], there[positions] = rows, True
            return
        known = there[positions]  # of logits, only positions after which a token was sampled
        positions, rows = positions[known], rows[known]
        (different,) = (as_bits(rows) != as_bits(kept[positions])).any(1).nonzero(as_tuple=True)
        if len(different):
            position, row = int(positions[different[0]]), rows[different[0]]
            far = float((row - kept[position]).abs().max())
            raise VerifyError(f"step {step}, {part}, position {position} (by {far:.2g} at most)")


class StatesProgram:
    """A native program that shows the states of a text: of all positions whose tokens, from the first one on, are those of the text."""

    def __init__(self, program: NativeProgram, store: KVStore, states: TextStates) -> None:
        self.vocab_size, self.nbytes, self.logits = program.vocab_size, program.nbytes, program.logits
        self._program, self._states, self._plan = program, states, StepPlan(0)
        self._layers = NativeLayers(program, NativeAttention(program, store.caches, store.states), self._see)
        self._indices, self._positions = NONE, NONE  # of the text's tokens in this step

    def load(self, plan: StepPlan) -> Shape:
        self._plan = plan
        return self._program.load(plan)

    def run(self, shape: Shape, whole: bool = False) -> Forward | None:
        forward = self._program.run(shape, whole)
        assert forward is not None, "one process has all layers"
        self._indices, self._positions = self._own_tokens()
        hidden, logits = self._layers.compute(forward.step)
        if not (same_bits(hidden, forward.hidden) and same_bits(logits, forward.logits)):
            raise VerifyError(f"step {self._plan.step}: one native call differs from its layers one by one")
        tokens = forward.step.sample_index
        sampled = torch.isin(tokens, self._indices)
        positions = self._positions[torch.searchsorted(self._indices, tokens[sampled])]
        self._states.see(self._plan.step, LOGITS, positions, logits[sampled])
        return forward

    def _see(self, part: str, rows: Tensor) -> None:
        self._states.see(self._plan.step, part, self._positions, rows[self._indices])

    def _own_tokens(self) -> tuple[Tensor, Tensor]:
        """Returns the indices of the text's tokens in the step, in ascending order, and their positions."""
        plan, ids = self._plan, self._states.ids
        indices, positions, begin = [NONE], [NONE], 0
        for row, start, count in zip(plan.row, plan.start, plan.num_query):
            end = min(start + count, len(ids))
            (different,) = (self._program.table.token_ids[row, :end] != ids[:end]).nonzero(as_tuple=True)
            own = torch.arange(start, max(start, int(different[0]) if len(different) else end))
            indices.append(begin + own - start)
            positions.append(own)
            begin += count
        return torch.cat(indices), torch.cat(positions)
