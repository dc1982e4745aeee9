"""The executor interface: how plans reach a runner and how results come back.

    forward(plan)    sample(masks) -> Promise    stop()

Plans are executed one at a time, in order. On the CPU `forward` computes before it returns, and the promise is already fulfilled. A
device computes while the caller continues, and the promise waits for it.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.messages import StepPlan, StepResult

Masks = NDArray[np.int32]  # [mask_rows of a plan, words]: one bit per id that is allowed next, least significant first


class Promise(Protocol):
    def result(self) -> StepResult:
        """Waits for the result and returns it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise whose result is already available."""

    made: StepResult

    def result(self) -> StepResult:
        return self.made


class Executor(Protocol):
    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, masks: Masks | None = None) -> Promise:
        """Samples for the plan that was forwarded last. `masks`: for its mask_rows"""

    def stop(self) -> None:
        """Frees everything."""
