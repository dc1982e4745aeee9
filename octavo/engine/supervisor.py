"""`Supervisor`: starts the engine process, sees at once when it ends, and starts another one, but not for ever.

How often and how soon: `octavo.child.Restarts`. After `max_restarts` it stays dead.
The process is the leader of a group of its own and is ended with all its children. It dies with this one, whatever happens here.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo import errors
from octavo.child import Restarts, command, is_stopped
from octavo.engine.process import Orders, Reason
from octavo.errors import EngineError, OctavoError
from octavo.log import logger


@dataclass(frozen=True, slots=True)
class Serving:
    """How an engine is served by a process of its own."""

    max_queue: int = 1024  # requests that may wait
    queue_timeout: float | None = None  # seconds one may
    max_restarts: int = 3
    beat_timeout: float = 3.0  # seconds without a sign of life after which the engine is dead
    hang_timeout: float = 300.0  # seconds a single step may take
    log_format: str = "text"
    step_seconds: float = 0.0  # that a step takes at least
    inspector: bool = False  # whether it may be watched


class Supervisor:
    """`on_start` hears of every start, `on_down` why an engine ended, `on_dead` why there will be no other."""

    def __init__(
        self,
        orders: Orders,
        max_restarts: int,
        on_start: Callable[[int], None],
        on_down: Callable[[str], None],
        on_dead: Callable[[OctavoError], None],
    ) -> None:
        self._orders = orders
        self._restarts = Restarts(max_restarts)
        self._on_start, self._on_down, self._on_dead = on_start, on_down, on_dead
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_at: float | None = None  # of the engine that runs
        self._verdict = ""  # why it was killed, if it was
        self._code = 0  # with which the last one ended
        self._task = lasting(self._supervise(), on_dead)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_stopped(self) -> bool:
        return self._process is not None and is_stopped(self._process.pid)

    def ready(self) -> None:
        """The engine said hello."""
        self._ready_at = time.monotonic()

    def kill(self, verdict: str) -> None:
        self._verdict = verdict
        self._end_group()

    async def stop(self) -> None:
        """At once, and for good."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._reap()

    async def _supervise(self) -> None:
        epoch, was_ready, restarts = 0, False, self._restarts
        while True:
            epoch += 1
            self._ready_at, self._verdict = None, ""
            self._on_start(epoch)
            try:
                error = self._why(await self._live(epoch))
            except OSError as trouble:
                error = EngineError(f"no process could be started: {trouble}")
            was_ready = was_ready or self._ready_at is not None
            healthy_seconds = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            logger.error("The engine process ended: %s", error)
            self._on_down(str(error))
            pause = restarts.pause(healthy_seconds) if was_ready else None
            if pause is None:
                self._on_dead(error)
                return
            logger.warning("Starting the engine again in %.1f s (%d of %d)", pause, restarts.count, restarts.most)
            await asyncio.sleep(pause)

    async def _live(self, epoch: int) -> bytes:
        """From its start to its end; what it said."""
        words = command("octavo.engine.process", "main", os.getpid())
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        said, ended = bytearray(), asyncio.get_running_loop().create_future()

        def hear() -> None:
            data = os.read(out, 4096)
            said.extend(data)
            if not data and not ended.done():  # nobody holds the other end any more
                ended.set_result(None)

        loop, out = asyncio.get_running_loop(), process.stdout.fileno()
        loop.add_reader(out, hear)
        try:
            with suppress(BrokenPipeError):
                os.write(process.stdin.fileno(), msgspec.json.encode(msgspec.structs.replace(self._orders, epoch=epoch)) + b"\n")
            await ended
        finally:
            loop.remove_reader(out)
            self._reap()
        return bytes(said)

    def _why(self, said: bytes) -> OctavoError:
        """As the user should see it: what it said of itself, or how it ended."""
        with suppress(msgspec.DecodeError):
            reason = msgspec.json.decode(said, type=Reason)
            kind = getattr(errors, reason.kind, EngineError)
            return kind(reason.message) if kind in (errors.ConfigError, errors.LoadError) else EngineError(reason.message)
        code = self._code
        ending = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"
        return EngineError(self._verdict or ending)

    def _reap(self) -> None:
        if self._process is None:
            return
        self._end_group()  # before anybody waits for it: its number is nobody else's yet
        with self._process:  # closes pipes, and waits
            pass
        self._code, self._process = self._process.returncode, None

    def _end_group(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def lasting(work: Coroutine[Any, Any, None], on_broken: Callable[[OctavoError], None]) -> asyncio.Task[None]:
    """A task that nobody waits for. What breaks it is logged and told, else it would vanish with the task."""

    def look(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the server cannot continue", exc_info=error)
            on_broken(EngineError(f"{type(error).__name__}: {error}"))

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(look)
    return task
