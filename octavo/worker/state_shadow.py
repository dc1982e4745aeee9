"""Verifies the states of recurrent layers bit for bit, beside the blocks that `worker/shadow.py` verifies.

    state slots    those that the engine uses: live ones, which forks share, and checkpoints, which are found and evicted
    shadow         a copy of the state of each row, made when its step is computed, and never of a slot. It is archived under the digest
                   when the slot is sealed as a checkpoint; a row starts from the archive at a hit, and from its parent at a fork

Before a recurrent layer is computed, the slot that each row reads must equal its copy. Then the same function runs over the copies, in
slots of its own, and must give the same results and states: those after the last token, and the checkpoints. A slot that is sealed must
hold the state after the tokens of its digest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from octavo.errors import VerifyError
from octavo.messages import StepPlan
from octavo.policy.state_pool import NULL_STATE, StateEvent
from octavo.step.step_tensors import NO_STATE, StepStates
from octavo.worker.kv_store import Caches
from octavo.worker.twice import Compared, same_bits


@dataclass(frozen=True, slots=True)
class State:
    position: int  # tokens that it covers
    values: Caches  # per layer, by buffer name


BEGIN = State(0, [])


class StateShadow:
    def __init__(self, own: Caches, num_rows: int, positions: Mapping[bytes, int], compared: Compared) -> None:
        """`own`: memory for a slot 0 of zeros, two slots for each row, and the checkpoints of a step.

        `positions`: how many tokens each digest covers, of all blocks that were sealed
        """
        self.own = own
        self._rows, self._positions, self._compared = num_rows, positions, compared
        self._plan = StepPlan(0)  # the last one, whose states are taken over by `_settle`
        self._states: dict[int, State | None] = {}  # row -> its state; None: as its first step says
        self._digests: dict[int, bytes | None] = {}  # row that has not begun -> digest of the block before its first token
        self._written: dict[int, State] = {}  # slot -> the state that a step wrote there
        self._key_of: dict[int, bytes] = {}  # slot -> its key, while it is a checkpoint
        self._archive: dict[bytes, State] = {}

    def on_event(self, event: StateEvent, slot: int, key: bytes | None, states: Caches) -> None:
        """Handles events of the state pool. `states`: the buffers of the engine"""
        self._settle()
        if event == "take":
            self._written.pop(slot, None)
        elif event == "evict":
            del self._archive[self._key_of.pop(slot)]
        else:
            assert key is not None
            state, covered = self._written.get(slot, BEGIN), self._positions[key]
            if state.position != covered:
                raise VerifyError(f"state slot {slot} is kept as the state after {covered} tokens, and holds that after {state.position}")
            for layer, own in enumerate(state.values):
                self._compare(layer, "a checkpoint that is kept", states[layer], slot, own, None)
            self._key_of[slot], self._archive[key] = key, state

    def apply(self, plan: StepPlan, digests: Mapping[int, bytes | None]) -> None:
        """Follows a plan. `digests`: of the last block of each row that is written, None if that block was not sealed"""
        self._settle()
        forked = [(self._states[fork.source], self._digests.get(fork.source)) for fork in plan.row_forks]  # all reads before any write
        for fork, (state, digest) in zip(plan.row_forks, forked):
            self._states[fork.row], self._digests[fork.row] = state, digest
        self._states |= dict.fromkeys(digests)
        self._digests |= digests
        self._plan = plan
        for entry, (row, start) in enumerate(zip(plan.row, plan.start)):
            state = self._states[row] or self._first(row, start, plan.states[entry][0])
            if state.position != start:
                where = f"step {plan.step}: row {row} continues after {start} tokens"
                raise VerifyError(f"{where}, and its state is that after {state.position}")
            for own, values in zip(self.own, state.values):
                for name, value in values.items():
                    own[name][1 + entry] = value

    def _first(self, row: int, start: int, slot: int) -> State:
        """Returns the state with which a row begins: none, a checkpoint, or that of a beam which was computed for all of them."""
        if start == 0:
            return BEGIN
        if (key := self._key_of.get(slot)) is None:
            return self._written.get(slot, BEGIN)
        if self._digests[row] not in (None, key):
            raise VerifyError(f"step {self._plan.step}: row {row} begins with the state after other tokens, in slot {slot}")
        self._compared.restored += 1
        return self._archive[key]

    def _settle(self) -> None:
        """Takes over what the last step computed."""
        plan, self._plan = self._plan, StepPlan(0)
        for entry, slot, number, position in self._targets(plan):
            state = State(position, [{name: buffer[number].clone() for name, buffer in layer.items()} for layer in self.own])
            self._written[slot] = state
            if slot == plan.states[entry][1]:
                self._states[plan.row[entry]] = state

    def _targets(self, plan: StepPlan) -> Iterator[tuple[int, int, int, int]]:
        """Yields what a step writes: the entry, the slot, the own slot, and the tokens that the state covers."""
        for entry, (_, slot) in enumerate(plan.states):
            yield entry, slot, 1 + self._rows + entry, plan.start[entry] + plan.num_query[entry]
        for number, (entry, covered, slot) in enumerate(plan.checkpoints):
            yield entry, slot, 1 + 2 * self._rows + number, covered

    def own_slots(self, states: StepStates) -> StepStates:
        """Returns the slots of a step over the copies. Whatever the engine sent, rows that begin read zeros, and others their copy."""
        plan, padding = self._plan, len(states.read) - len(self._plan.row)
        first = list(accumulate(plan.num_query, initial=0))
        read = [1 + entry if start else NULL_STATE for entry, start in enumerate(plan.start)] + [NULL_STATE] * padding
        write = [1 + self._rows + entry for entry in range(len(plan.row))] + [NO_STATE] * padding
        ends = [first[entry] + covered - plan.start[entry] for entry, covered, _ in plan.checkpoints]
        before = [sum(other < entry for other, _, _ in plan.checkpoints) for entry in range(len(states.read) + 1)]
        checkpoints = [(end, 1 + 2 * self._rows + number) for number, end in enumerate(ends)]
        words = [torch.tensor(values, dtype=torch.int32, device=states.read.device) for values in (read, write, before, checkpoints)]
        return StepStates(words[0], words[1], states.start, words[2], words[3].view(-1, 2))

    def compare_read(self, layer: int, states: dict[str, torch.Tensor]) -> None:
        """The slot that each row reads must hold its state. `states`: of this layer, in the engine"""
        for entry, (slot, _) in enumerate(self._plan.states):
            own = {name: buffer[1 + entry if self._plan.start[entry] else 0] for name, buffer in self.own[layer].items()}
            self._compare(layer, "before its tokens", states, slot, own, entry)

    def compare_written(self, layer: int, states: dict[str, torch.Tensor]) -> None:
        for entry, slot, number, position in self._targets(self._plan):
            own = {name: buffer[number] for name, buffer in self.own[layer].items()}
            self._compare(layer, f"written after {position} tokens", states, slot, own, entry)

    def _compare(
        self, layer: int, what: str, states: dict[str, torch.Tensor], slot: int, own: dict[str, torch.Tensor], entry: int | None
    ) -> None:
        for name, value in own.items():
            if not same_bits(states[name][slot], value):
                where = "" if entry is None else f"step {self._plan.step}, row {self._plan.row[entry]}, "
                raise VerifyError(f"the states differ: {where}layer {layer}, {name} of slot {slot} ({what})")
            self._compared.state_values += value.numel()
