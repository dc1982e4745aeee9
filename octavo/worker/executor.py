"""The executor seam: how plans reach a runner and results come back.

    start() -> CacheGeometry    forward(plan)    sample(step, masks) -> Promise    stop()

`Inproc` runs in the caller's thread: on the CPU forward computes before it returns, and the promise is kept already; a device
computes while the caller goes on, and the promise waits for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.messages import StepPlan, StepResult
from octavo.policy.cache_spec import CacheGeometry

Masks = NDArray[np.int32]  # [mask_rows of a plan, words]: a bit for each id that may come next, least significant first


class Promise(Protocol):
    def result(self) -> StepResult:
        """Waits for it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise with nothing to wait for."""

    made: StepResult

    def result(self) -> StepResult:
        return self.made


class Runner(Protocol):
    """Carries out one plan at a time, in order."""

    def start(self) -> CacheGeometry:
        """Load, size and warm up; says what it found."""

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, masks: Masks | None = None) -> StepResult | Promise:
        """Tokens of the plan last forwarded, or that they will come. `masks`: of the plan's mask_rows"""

    def stop(self) -> None:
        """Free everything."""


class Executor(Protocol):
    def start(self) -> CacheGeometry: ...

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, step: int, masks: Masks | None = None) -> Promise:
        """Tokens of the plan last forwarded, which was that of `step`. `masks`: of its mask_rows"""

    def stop(self) -> None: ...


class Inproc:
    def __init__(self, make_runner: Callable[[], Runner]) -> None:
        self._runner = make_runner()

    def start(self) -> CacheGeometry:
        return self._runner.start()

    def forward(self, plan: StepPlan) -> None:
        self._runner.forward(plan)

    def sample(self, step: int, masks: Masks | None = None) -> Promise:
        made = self._runner.sample(masks)
        return Kept(made) if isinstance(made, StepResult) else made

    def stop(self) -> None:
        self._runner.stop()
