"""Further API processes on one port (`--api-processes`): each has the listening socket by its descriptor, its orders through a pipe.

    parent ── socket, pipe ──► sibling ── unix socket ──► the one engine

The pipe stays open while the parent lives: when it ends, however that came about, so do its siblings. A terminal's Ctrl-C reaches the
parent alone, which passes signals on. A sibling that dies is started again, as often as an engine would be.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from octavo.child import command
from octavo.config import EngineConfig
from octavo.log import logger
from octavo.server_config import ServerConfig


class Orders(Struct, frozen=True):
    """All a sibling is told; through a pipe, because there are keys in it."""

    engine: EngineConfig
    server: ServerConfig
    address: str  # of the engine's socket
    model_name: str
    row: int = 0  # its own, of the numbers that all API processes share


class Siblings:
    def __init__(self, orders: Orders, listener: socket.socket) -> None:
        self._orders = orders
        self._command = command("octavo.server.start", "sibling", listener.fileno())
        self._listener = listener
        self._restarts_left = orders.server.max_restarts
        self._stopping = False
        self._processes = [self._start(place) for place in range(orders.server.api_processes - 1)]

    def check(self) -> bool:
        """Start again what died; False where that was too often."""
        for place, process in enumerate(self._processes):
            if process.poll() is None or self._stopping:
                continue
            logger.error("an API process ended with code %d", process.returncode)
            if self._restarts_left == 0:
                return False
            self._restarts_left -= 1
            self._processes[place] = self._start(place)
        return True

    def pass_on(self, again: bool) -> None:
        """The parent was told to stop."""
        self._stopping = True
        for process in self._processes:
            process.send_signal(signal.SIGKILL if again else signal.SIGTERM)

    async def ended(self, seconds: float) -> None:
        """Wait until all have ended; those that do not are ended."""
        if not self._stopping:
            self.pass_on(again=False)
        deadline = asyncio.get_running_loop().time() + seconds
        while self._alive() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for process in self._alive():
            process.kill()
        for process in self._processes:
            process.wait()

    def _alive(self) -> Sequence[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        fds = [self._listener.fileno()]
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which `check` will see
            process.stdin.write(msgspec.json.encode(msgspec.structs.replace(self._orders, row=place + 1)) + b"\n")
            process.stdin.flush()
        return process


def take_orders() -> Orders:
    """What a sibling starts with. From here on it ends when its parent does."""
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # until the parent's end of the pipe is closed; a file object would be locked at exit
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return orders
