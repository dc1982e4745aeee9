"""The executor interface: how plans reach a runner and how results come back.

    forward(plan)    sample(masks) -> Promise    stop()

Plans are executed one at a time, in order. On the CPU `forward` computes before it returns, and the promise is already fulfilled. A
device computes while the caller continues, and the promise waits for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.messages import StepPlan, StepResult

Masks = NDArray[np.int32]  # [outputs of a plan's mask_rows, words]: one bit per id that is allowed next, least significant first


class Promise(Protocol):
    def result(self) -> StepResult:
        """Waits for the result and returns it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise whose result is already available."""

    made: StepResult

    def result(self) -> StepResult:
        return self.made


def row_masks(plan: StepPlan, masks: Masks) -> dict[int, Masks]:
    """Returns the masks of each scheduled row that has any, up to the first one that allows nothing. [outputs, words] each"""
    found: dict[int, Masks] = {}
    start = 0
    for entry in plan.mask_rows:
        own = masks[start : start + plan.outputs[entry]]
        start += plan.outputs[entry]
        if len(own) > 1 and not (usable := own.any(axis=1)).all():
            own = own[: max(1, int(usable.argmin()))]
        found[entry] = own
    assert start == len(masks)
    return found


def num_drafts(plan: StepPlan, entry: int, masks: Mapping[int, Masks]) -> int:
    """Returns how many drafts of a scheduled row that has some may be accepted. masks: from `row_masks`"""
    count = len(plan.drafts[entry])
    return count if entry not in masks else min(count, len(masks[entry]) - 1)


class Executor(Protocol):
    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, masks: Masks | None = None) -> Promise:
        """Samples for the plan that was forwarded last. `masks`: of its mask_rows, a mask for each output

        Where a mask allows nothing, the draft before it is not accepted, so that its row samples nothing there.
        """

    def stop(self) -> None:
        """Frees everything."""
