"""Fault points of the worker, switched on only by tests; without a switch nothing happens."""

from octavo.config import Debug
from octavo.errors import EngineError


class Faults:
    def __init__(self, debug: Debug) -> None:
        self._debug = debug

    def before_forward(self, step: int) -> None:
        if step == self._debug.forward_raise:
            raise EngineError(f"fault point forward.raise at step {step}")

    def poisons(self, step: int, entry: int) -> bool:
        """Whether this plan entry is to come out not finite."""
        return step == self._debug.forward_nan and entry == 0

    def spoils_id(self, step: int) -> bool:
        """Whether the first sample of the step is to be an id outside the vocabulary."""
        return step == self._debug.sample_bad_id
