"""The executor: how plans reach a runner and results come back.

    forward(plan)    sample(masks) -> Promise    stop()

Plans are carried out one at a time, in order. On the CPU forward computes before it returns, and the promise is kept already; a
device computes while the caller goes on, and the promise waits for it.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.messages import StepPlan, StepResult

Masks = NDArray[np.int32]  # [mask_rows of a plan, words]: a bit for each id that may come next, least significant first


class Promise(Protocol):
    def result(self) -> StepResult:
        """Waits for the result and returns it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise with nothing to wait for."""

    made: StepResult

    def result(self) -> StepResult:
        return self.made


class Executor(Protocol):
    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, masks: Masks | None = None) -> Promise:
        """Samples from the plan last forwarded. `masks` are those of its mask_rows."""

    def stop(self) -> None:
        """Frees everything."""
