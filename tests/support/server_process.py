"""A server in a process of its own, and raw bytes sent to it: what is tested is what arrives, not what a client library makes of it."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.engine.stall_watch import SAID
from tests.cli.processes import ROOT, SECONDS, environment
from tests.support.forked import forked

WATCH = "loop.slow=200,step.slow=1000"  # milliseconds of CPU time, see octavo/engine/stall_watch.py
STAND_IN = "tests.support.watched_server --stand-in"  # a server without an engine
READY = re.compile(r"^Octavo is ready: http://(\S+):(\d+)  model=(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Checked to be an error in the one form, with nothing in it that is not for a client."""
        assert self.headers["content-type"].startswith("application/json"), self
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}, self
        error: dict[str, Any] = self.json["error"]
        assert error["message"] and error["message"].isascii(), self
        assert not re.search(r'Traceback|0x[0-9a-f]{6}|File "|/usr/|/etc/|/tmp/|site-packages', self.body.decode()), self
        return error


class ServerProcess:
    """Its loops are watched: a test in which one of them did not turn for too long fails when it leaves its server."""

    def __init__(
        self, module: str, *flags: str, env: dict[str, str] | None = None, cwd: Path = ROOT, watch: str = WATCH, forks: bool = True
    ) -> None:
        """`watch`: what is added to OCTAVO_DEBUG. `forks`: see tests/support/forked.py. Neither where the server is to be measured.

        Where its processes are counted, or known by their commands, they are not forked either.
        """
        command = [sys.executable, "-m", *module.split(), "--port", "0", *flags]
        given = environment(env or {})
        if switches := ",".join(filter(None, (given.get("OCTAVO_DEBUG"), watch))):
            given["OCTAVO_DEBUG"] = switches
        settings: dict[str, Any] = {"cwd": cwd, "env": given, "stderr": subprocess.PIPE, "text": True}
        start = partial(forked, forks_children=module != STAND_IN) if forks and watch else subprocess.Popen
        self.process = start(command, **settings)
        self.stderr = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        found = self.wait_for(READY)
        self.host, self.port, self.model = found[1], int(found[2]), found[3]

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(SECONDS)
        if value is None:
            self.check_stalls()

    def check_stalls(self) -> None:
        """What the watch of the loops has found so far."""
        found = self.stderr.find(SAID)
        assert found < 0, f"a loop {self.stderr[found : found + 5000]}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        deadline = time.monotonic() + SECONDS
        while (found := pattern.search(self.stderr)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.stderr[-3000:]
            time.sleep(0.02)
        return found

    def ended(self, seconds: float = SECONDS) -> int:
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + seconds
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, f"it has not ended after {seconds} s: {self.stderr[-3000:]}"
            time.sleep(0.01)
        self._reader.join(SECONDS)
        return code

    def memory(self, line: str) -> int:
        """Bytes: VmRSS now, VmHWM at most so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(rf"{line}:\s+(\d+) kB", status)[1])  # type: ignore[index]

    def connect(self, seconds: float = 60) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=seconds)

    def send(self, data: bytes, seconds: float = 60, most: int = 1000) -> list[Reply]:
        """The answers to these bytes."""
        with self.connect(seconds) as sock:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # it has heard enough
                sock.sendall(data)
            return read_replies(sock, most)

    def ask(self, method: str, path: str, body: bytes | object = b"", **headers: str) -> Reply:
        """One request on a connection of its own; header names with _ for -."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"host": f"{self.host}:{self.port}", "connection": "close"}
        given |= {"content-type": "application/json", "content-length": str(len(data))} if data else {}
        given |= {name.replace("_", "-").lower(): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value != "-")
        (reply,) = self.send(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + data)
        return reply


def read_replies(sock: socket.socket, most: int = 1000) -> list[Reply]:
    """Until the server closes the connection, or `most` have come."""
    data = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while len(_parsed(data)) < most and (piece := sock.recv(65536)):
            data += piece
    return _parsed(data)


def _parsed(data: bytes) -> list[Reply]:
    replies = []
    while b"\r\n\r\n" in data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", len(data) if "transfer-encoding" in headers else 0))
        if len(data) < length:
            break
        replies.append(Reply(int(first.split()[1]), headers, data[:length]))
        data = data[length:]
    return replies
