"""The executor seam: how plans reach a runner and results come back.

    start() -> CacheGeometry    forward(plan)    sample(step) -> Future[StepResult]    stop()

`Inproc` runs in the caller's thread: forward computes before it returns, and the future is already done.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from octavo.messages import StepPlan, StepResult
from octavo.policy.cache_spec import CacheGeometry


class Runner(Protocol):
    """Carries out one plan at a time, in order."""

    def start(self) -> CacheGeometry:
        """Load, size and warm up; says what it found."""

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self) -> StepResult:
        """Tokens of the plan last forwarded."""

    def stop(self) -> None:
        """Free everything."""


class Executor(Protocol):
    def start(self) -> CacheGeometry: ...

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, step: int) -> "Future[StepResult]": ...

    def stop(self) -> None: ...


class Inproc:
    def __init__(self, make_runner: Callable[[], Runner]) -> None:
        self._runner = make_runner()

    def start(self) -> CacheGeometry:
        return self._runner.start()

    def forward(self, plan: StepPlan) -> None:
        self._runner.forward(plan)

    def sample(self, step: int) -> "Future[StepResult]":
        future: Future[StepResult] = Future()
        result = self._runner.sample()
        assert result.step == step, f"result of step {result.step} where {step} was asked for"
        future.set_result(result)
        return future

    def stop(self) -> None:
        self._runner.stop()
