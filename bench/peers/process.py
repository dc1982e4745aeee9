"""An engine in a process of its own, by the Python of its own environment; what runs there is `serve.py`."""

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from octavo.worker.machine import proc_bytes

Requests = list[tuple[list[int], int]]


@dataclass(frozen=True, slots=True)
class Reply:
    seconds: float
    answers: list[list[int]]
    times: list[list[float]]  # seconds until each token of each answer; empty where the engine does not say


class EngineFailed(Exception):
    """The process ended, or gave something else than was asked for; the message says what."""


class EngineProcess:
    def __init__(self, command: list[str], settings: dict[str, object], environment: dict[str, str]) -> None:
        self.started = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [*command, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **environment},
        )

    def call(self, requests: Requests) -> Reply:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(requests), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineFailed(self._last_words())
        reply = Reply(**json.loads(line))
        short = [(len(ids), count) for ids, (_, count) in zip(reply.answers, requests, strict=True) if len(ids) != count]
        if short:
            raise EngineFailed(f"an answer has {short[0][0]} of {short[0][1]} tokens")
        return reply

    def peak_memory(self) -> int:
        """Most bytes the process and its children held, each at its own worst moment."""
        return sum(proc_bytes(Path(f"/proc/{pid}/status"), "VmHWM") or 0 for pid in _family(self._process.pid))

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """End it, and wait until its memory and cores are free again."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"it ended with exit code {code}; its last line: {lines[-1] if lines else 'none'}"


def _family(pid: int) -> list[int]:
    found = [pid]
    for each in found:  # grows while it is walked
        try:
            found += [int(child) for task in Path(f"/proc/{each}/task").iterdir() for child in (task / "children").read_text().split()]
        except OSError:
            continue  # it ended meanwhile
    return found
