"""Fault points of the engine. Only tests enable them; otherwise there is no `Faults`."""

import os
import signal
import time

from octavo.config import Debug
from octavo.errors import EngineError


class Faults:
    @staticmethod
    def of(debug: Debug) -> "Faults | None":
        """Returns the fault points that are enabled, or None if none is."""
        in_steps = debug.forward_raise, debug.forward_sleep, debug.forward_nan, debug.sample_bad_id, debug.exit_sigkill
        return Faults(debug) if any(in_steps) or debug.ipc_drop or debug.ipc_truncate or debug.ipc_garbage else None

    def __init__(self, debug: Debug) -> None:
        self._debug = debug

    def before_forward(self, step: int) -> None:
        if step == self._debug.exit_sigkill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._debug.forward_sleep:
            time.sleep(self._debug.forward_sleep / 1000)
        if step == self._debug.forward_raise:
            raise EngineError(f"fault point forward.raise at step {step}")

    def poisons(self, step: int, entry: int) -> bool:
        """Whether this scheduled row must produce values that are not finite."""
        return step == self._debug.forward_nan and entry == 0

    def spoils_id(self, step: int) -> bool:
        """Whether the first sample of the step must be an id outside the vocabulary."""
        return step == self._debug.sample_bad_id

    def on_the_way(self, number: int, frame: bytes) -> bytes:
        """Returns what arrives of a frame of updates."""
        if number == self._debug.ipc_drop:
            return b""
        if number == self._debug.ipc_truncate:
            return frame[: len(frame) // 2]
        return bytes(reversed(frame)) if number == self._debug.ipc_garbage else frame
