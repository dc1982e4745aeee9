"""`Supervisor` starts the engine process, notices its end at once, and restarts it. `SocketFolder` holds the engine's socket.

`octavo.child.Restarts` defines how often and how soon. After `max_restarts` the engine stays dead.
The process leads a process group of its own and is ended with all its children. It always dies with this process.
"""

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from octavo.child import Restarts, command, how_ended, is_stopped
from octavo.config import EngineConfig, log_level
from octavo.engine.process import Reason, SpawnConfig
from octavo.engine.routing import Policy
from octavo.errors import ConfigError, EngineError, OctavoError
from octavo.loading.text_side import TextSide
from octavo.log import logger
from octavo.messages import EngineFacts
from octavo.own_file import naming_tmpdir


@dataclass(frozen=True, slots=True)
class Serving:
    """The settings of an engine in a process of its own."""

    max_queue: int = 1024  # requests that may wait
    queue_timeout: float | None = None  # seconds that a request may wait
    max_restarts: int = 3
    beat_timeout: float = 3.0  # seconds without a heartbeat after which the engine is dead
    hang_timeout: float = 300.0  # seconds that a single step may take
    log_format: str = "text"
    step_seconds: float = 0.0  # seconds that a step takes at least
    inspector: bool = False  # whether it may be watched
    engines: int = 1
    routing: Policy = "prefix"  # how an engine is chosen for a request
    first_number: int = 0  # number of this process's first request; numbers seed the noise of sampling
    number_step: int = 1  # step between numbers: each API process has its own numbers

    def restarts(self) -> Restarts:
        """Returns how often and how soon an engine is restarted. If other engines serve meanwhile, the pauses do not grow."""
        return Restarts(self.max_restarts, grows=self.engines == 1)


def spawn_config_of(
    text: TextSide, config: EngineConfig, serving: Serving, number: int, address: str, digest_key: bytes, first: EngineFacts | None
) -> SpawnConfig:
    """Returns the configuration of an engine. `first`: that of the first, which determines the size of the pool for all."""
    source = text.source
    if first is not None and serving.engines > 1:
        limits = first.limits
        config = replace(config, num_gpu_blocks_override=limits.num_blocks, max_model_len=limits.max_model_len)
    return SpawnConfig(
        config=replace(config, model=str(source.path), revision=None),
        path=str(source.path),
        kind=source.kind,
        name=source.name,
        end_ids=text.model.eos_token_ids,
        address=address,
        epoch=0,
        max_queue=serving.max_queue,
        queue_timeout=serving.queue_timeout,
        log_level=log_level("INFO"),
        log_format=serving.log_format,
        step_seconds=serving.step_seconds,
        inspector=serving.inspector,
        engines=serving.engines,
        number=number,
        on_host=serving.engines,
        place=number,
        memory_share=serving.engines if first is None else 1,
        digest_key=digest_key,
        weights=b"" if first is None else first.weights,
    )


class Supervisor:
    """Calls `on_start` at every start, `on_down` with why an engine ended, and `on_dead` with why there will be no other."""

    def __init__(
        self,
        spawn: SpawnConfig,
        restarts: Restarts,
        on_start: Callable[[int], None],
        on_down: Callable[[str], None],
        on_dead: Callable[[OctavoError], None],
    ) -> None:
        self.spawn = spawn  # for the next start
        self._restarts = restarts
        self._on_start, self._on_down, self._on_dead = on_start, on_down, on_dead
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_at: float | None = None  # of the running engine
        self._verdict = ""  # why it was killed, if it was
        self._replaces = False  # it was killed in order to be replaced
        self._code = 0  # exit code of the last process
        self._task = lasting(self._supervise(), on_dead)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_stopped(self) -> bool:
        return self._process is not None and is_stopped(self._process.pid)

    def ready(self) -> None:
        """Records that the engine is ready."""
        self._ready_at = time.monotonic()

    def kill(self, verdict: str) -> None:
        self._verdict = verdict
        self._end_group()

    def replace(self) -> None:
        """Ends the engine and starts another one at once. This does not count as a restart."""
        self._replaces = True
        self.kill("it is replaced")

    async def stop(self) -> None:
        """Ends the engine at once and permanently."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._reap()

    async def _supervise(self) -> None:
        epoch, was_ready, restarts = 0, False, self._restarts
        while True:
            epoch += 1
            spawn = msgspec.structs.replace(self.spawn, epoch=epoch, silent=bool(self._verdict))
            self._ready_at, self._verdict = None, ""
            self._on_start(epoch)
            try:
                error = self._why(await self._live(spawn))
            except OSError as trouble:
                error = EngineError(f"no process could be started: {trouble}")
            was_ready = was_ready or self._ready_at is not None
            healthy_seconds = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            if self._replaces:
                self._replaces, self._verdict = False, ""
                self._on_down(str(error))
                continue
            if self.spawn.engines == 1:
                logger.error("The engine process ended: %s", error)
            else:
                logger.error("Engine %d ended: %s", self.spawn.number, error)
            self._on_down(str(error))
            pause = restarts.pause(healthy_seconds) if was_ready else None
            if pause is None:
                self._on_dead(error)
                return
            logger.warning("Starting it again in %.1f s (%d of %d)", pause, restarts.count, restarts.most)
            await asyncio.sleep(pause)

    async def _live(self, spawn: SpawnConfig) -> bytes:
        """Waits from the start of the process to its end. Returns its output."""
        module = "octavo.engine.ray_engine" if spawn.is_on_ray else "octavo.engine.process"
        words = command(module, "main", os.getpid())
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        output, ended = bytearray(), asyncio.get_running_loop().create_future()

        def hear() -> None:
            data = os.read(out, 4096)
            output.extend(data)
            if not data and not ended.done():  # no process holds the other end any more
                ended.set_result(None)

        loop, out = asyncio.get_running_loop(), process.stdout.fileno()
        loop.add_reader(out, hear)
        try:
            with suppress(BrokenPipeError):
                os.write(process.stdin.fileno(), msgspec.json.encode(spawn) + b"\n")
            await ended
        finally:  # also if this task is cancelled
            loop.remove_reader(out)
            self._end_group()
            await asyncio.to_thread(process.wait)  # the system may need seconds to free a large process
            self._reap()
        return bytes(output)

    def _why(self, output: bytes) -> OctavoError:
        """Returns the reason for the user: the process's own message, or how it ended."""
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(output, type=Reason).error()
        return EngineError(self._verdict or f"it {how_ended(self._code)}")

    def _reap(self) -> None:
        if self._process is None:
            return
        self._end_group()
        with self._process:  # closes the pipes, and waits
            pass
        self._code, self._process = self._process.returncode, None

    def _end_group(self) -> None:
        """Kills the process and its children. Once it is reaped, its id may belong to another process."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def lasting(work: Coroutine[Any, Any, None], on_broken: Callable[[OctavoError], None]) -> asyncio.Task[None]:
    """Starts a task that is not awaited. An error in it is logged and reported; otherwise it would vanish with the task."""

    def look(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the server cannot continue", exc_info=error)
            on_broken(EngineError(f"{type(error).__name__}: {error}"))

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(look)
    return task


# -- the folder of the engine's socket: only its owner may read it, its path is short enough, and it is restored if removed
#
#     TMPDIR/octavo-engine-XXXXXXXX/engine    or in /tmp, if TMPDIR is too long for the address of a socket

PREFIX = "octavo-engine-"
NAME = "engine"
MOST_BYTES = (103 if sys.platform == "darwin" else 107) - len(f"/{PREFIX}XXXXXXXX/{NAME}")  # of TMPDIR: the path of a socket has a limit
SHORT_PLACE = "/tmp"


class SocketFolder:
    """A folder that is locked while its owner lives. An unlocked folder was left behind, or is so new that its owner makes another."""

    def __init__(self) -> None:
        with naming_tmpdir():
            place = _place()
            _sweep(place)
            lock = None
            while lock is None:
                self._path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))  # 0700
                lock = _locked(self._path)
            self._lock = lock
        self.address = f"ipc://{self._path / NAME}"

    def make_again(self) -> None:
        """Restores the folder if a cleaner of temporary files removed it. It keeps its name, which other processes know."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self._path), os.fstat(self._lock)):
                return
        self._path.mkdir(0o700, parents=True)  # a folder that another user put there is not used
        lock = _locked(self._path)
        if lock is not None:
            os.close(self._lock)
            self._lock = lock

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._lock)


def _place() -> str:
    place = tempfile.gettempdir()
    if _fits(place):
        return place
    if not os.access(SHORT_PLACE, os.W_OK):
        raise ConfigError(
            f"TMPDIR is {len(os.fsencode(place))} bytes long, at most {MOST_BYTES} leave room for the path of the engine's socket: "
            f"set it to a shorter folder ({SHORT_PLACE} cannot be written, either)"
        )
    return SHORT_PLACE


def _fits(place: str) -> bool:
    try:
        return len(place.encode()) <= MOST_BYTES
    except UnicodeEncodeError:  # bytes that are not text cannot be sent to the other processes
        return False


def _locked(path: Path) -> int | None:
    """Returns a descriptor that holds the lock of a new folder, or None if another server has removed it before it was locked."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # some file systems have no locks; then the folder is not removed either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)
    return None


def _sweep(place: str) -> None:
    """Removes this user's folders whose owner was killed."""
    for path in Path(place).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, is being removed by another process, or is locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
