"""Siblings are further API processes on the same port (`--api-processes`). Each inherits the listening socket and gets its
configuration by a pipe.

    parent ── socket, pipe ──► sibling ── unix socket ──► the one engine
           ◄── beats, in the metrics they share ──

The pipe stays open while the parent lives: when the parent ends, for whatever reason, its siblings end too. Ctrl-C in a terminal reaches
only the parent, which passes signals on. A sibling that dies is started again, as often and as soon as an engine would be. A
sibling that is stopped, or shows no sign of life although it has a CPU, is killed first.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec
from msgspec import Struct

from octavo.child import CpuWait, Restarts, command, is_stopped
from octavo.config import EngineConfig
from octavo.engine.router import CLIENT_SECONDS
from octavo.log import logger
from octavo.server.metrics import Numbers
from octavo.server.records import TICK_SECONDS
from octavo.server_config import ServerConfig

SILENT_TICKS = round(CLIENT_SECONDS / TICK_SECONDS)  # the engine, too, gives up a client's requests after this time


class SpawnConfig(Struct, frozen=True):
    """Everything a sibling has to know. It goes through a pipe, because it has keys in it."""

    engine: EngineConfig
    server: ServerConfig
    address: str  # the engine's socket
    model_name: str
    shared: int | None = None  # descriptor of the file with the metrics of all API processes
    pins: int | None = None  # descriptor of the file with the pinned prefixes
    row: int = 0  # the sibling's own row in that file
    starts: int = 0  # how often it was started before


class Sibling:
    """One sibling: starts its process, watches it, and starts it again when it has ended."""

    def __init__(self, spawn: SpawnConfig, listener: socket.socket, numbers: Numbers) -> None:
        self._spawn_config = spawn
        self._listener = listener
        self._numbers = numbers
        self._restarts = Restarts(spawn.server.max_restarts)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_at: float | None = None  # when it first showed a sign of life
        self._beats = 0.0  # at the last check
        self._silent_ticks = 0  # checks since its last beat
        self._killed = False
        self._start_at = 0.0  # when the next start is due
        self._starts = 0
        self._dead = False  # it will not be started again
        self._start()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check(self) -> bool:
        """Kills the process if it hangs, and starts it again if it has ended. Returns False if that happened too often.

        Called every TICK_SECONDS.
        """
        if self._process is None:
            if not self._dead and time.monotonic() >= self._start_at:
                self._start()
        elif (code := self._process.poll()) is not None:
            self._ended(f"ended with code {code}")
        elif not self._killed and (verdict := self._verdict(self._process.pid)):
            logger.error("API process %d is killed: %s", self._process.pid, verdict)
            self._process.kill()
            self._killed = True
        return not self._dead

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()

    def _verdict(self, pid: int) -> str:
        """Returns why the process has to be killed, or "" if it is well.

        Silence is counted in ticks of this process and not in seconds, because there are no ticks while the whole machine sleeps. Ticks
        in which the sibling only waited for a CPU are not counted: it would go on if it were let. A sibling that is still starting is
        silent, and may be until the model is loaded.
        """
        beats = self._numbers.beats(self._spawn_config.row)
        if beats != self._beats:
            self._beats, self._silent_ticks = beats, 0
            self._ready_at = time.monotonic() if self._ready_at is None else self._ready_at
        elif self._ready_at is not None and not self._cpu_wait.lasts():
            self._silent_ticks += 1
        if is_stopped(pid):
            return "it was stopped"
        if self._silent_ticks > SILENT_TICKS:
            return f"it gave no sign of life for {CLIENT_SECONDS:g} s"
        return ""

    def _start(self) -> None:
        self._ready_at, self._killed = None, False
        self._beats, self._silent_ticks = self._numbers.beats(self._spawn_config.row), 0
        inherited = [each for each in (self._listener.fileno(), self._spawn_config.shared, self._spawn_config.pins) if each is not None]
        words = command("octavo.server.run", "sibling", self._listener.fileno())
        spawn, self._starts = msgspec.structs.replace(self._spawn_config, starts=self._starts), self._starts + 1
        try:
            # a group of its own, which Ctrl-C does not reach, but no session: Linux may give each session its own share of the CPUs
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=inherited, process_group=0)
        except OSError as error:
            self._ended(f"could not be started: {error}")
            return
        self._cpu_wait = CpuWait(self._process.pid)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has already ended, which `check` will notice
            self._process.stdin.write(msgspec.json.encode(spawn) + b"\n")
            self._process.stdin.flush()

    def _ended(self, how: str) -> None:
        """Plans the next start, or gives up."""
        logger.error("an API process %s", how)
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # the process ended before it had read its configuration
                self._process.stdin.close()
        self._process = None
        now, restarts = time.monotonic(), self._restarts
        pause = restarts.pause(0.0 if self._ready_at is None else now - self._ready_at)
        if pause is None:
            self._dead = True
            return
        self._start_at = now + pause
        logger.warning("Starting an API process again in %.1f s (%d of %d)", pause, restarts.count, restarts.most)


class Siblings:
    def __init__(self, spawn: SpawnConfig, listener: socket.socket, numbers: Numbers) -> None:
        self._stopping = False
        given = [msgspec.structs.replace(spawn, shared=numbers.shared, row=row) for row in range(1, spawn.server.api_processes)]
        self._all = [Sibling(each, listener, numbers) for each in given]

    def check(self) -> bool:
        """Checks every sibling. Returns False if one of them died too often."""
        return self._stopping or all(each.check() for each in self._all)

    def pass_on(self, again: bool) -> None:
        """Tells all siblings to stop, as the parent was told; `again`: by a second signal, which kills them."""
        self._stopping = True
        for each in self._all:
            each.send(signal.SIGKILL if again else signal.SIGTERM)

    async def ended(self, seconds: float) -> None:
        """Waits until all siblings have ended, and kills those that are left after `seconds`."""
        if not self._stopping:
            self.pass_on(again=False)
        deadline = asyncio.get_running_loop().time() + seconds
        while any(each.is_alive for each in self._all) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for each in self._all:
            each.send(signal.SIGKILL)
            each.wait()


def read_spawn_config() -> SpawnConfig:
    """Called by a sibling: returns its spawn, and makes its process end when the parent's does."""
    spawn = msgspec.json.decode(sys.stdin.buffer.readline(), type=SpawnConfig)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # until the parent's end of the pipe is closed; a file object would be locked at exit
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return spawn
