"""The executor seam: how plans reach a runner and results come back.

    start() -> CacheGeometry    forward(plan)    sample(step) -> Promise    stop()

`Inproc` runs in the caller's thread: on the CPU forward computes before it returns, and the promise is kept already; a device
computes while the caller goes on, and the promise waits for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.messages import StepPlan, StepResult
from octavo.policy.cache_spec import CacheGeometry


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

    def sample(self) -> StepResult | Promise:
        """Tokens of the plan last forwarded, or that they will come."""

    def stop(self) -> None:
        """Free everything."""


class Executor(Protocol):
    def start(self) -> CacheGeometry: ...

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, step: int) -> Promise:
        """Tokens of the plan last forwarded, which was that of `step`."""

    def stop(self) -> None: ...


class Inproc:
    def __init__(self, make_runner: Callable[[], Runner]) -> None:
        self._runner = make_runner()

    def start(self) -> CacheGeometry:
        return self._runner.start()

    def forward(self, plan: StepPlan) -> None:
        self._runner.forward(plan)

    def sample(self, step: int) -> Promise:
        made = self._runner.sample()
        return Kept(made) if isinstance(made, StepResult) else made

    def stop(self) -> None:
        self._runner.stop()
