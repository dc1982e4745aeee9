"""Compiles kernels in other processes while this one imports torch, starts CUDA and reads weights.

    this process     starts it | torch, CUDA | sends `Wanted`    | weights | warm-up: waits for each kernel it calls, if necessary
    the compilers    torch, triton ..........| one kernel per process at a time, into Triton's cache on disk ....

One process is started, which forks the others (`compile_process.py`): this process, which runs CUDA, is never forked. None of them
starts CUDA or outlives this one. Kernels that they do not finish are compiled here on their first call, which only costs time.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from octavo.child import command
from octavo.log import Stopwatch, logger
from octavo.worker.kernel_shapes import KernelShapes

DRIVER = "driver"  # the part of Triton that launches kernels
SEEN, DONE, FAILED = "all", "done", "failed"  # first word of a line from the compile process


@dataclass(frozen=True, slots=True)
class Wanted:
    """Everything that determines which kernels are compiled."""

    shapes: KernelShapes
    dtype: str
    block_size: int
    max_len: int
    layout: Literal["nhd", "hnd"]  # of the KV cache
    capability: int  # 90 for 9.0
    processes: int


def variant(function: Any, key: str) -> str:
    """Returns a kernel's name for both sides. `function`, `key`: from Triton's hook; a key contains types, constants and options."""
    return f"{function.module}.{function.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


class Compilers:
    """The compile processes. If there are none, kernels are compiled in this process."""

    def __init__(self, process: "subprocess.Popen[str] | None" = None) -> None:
        self.seconds_waited = 0.0
        self._process = process
        self._request = ""
        self._known: set[str] | None = None  # None: the list has not arrived yet
        self._coming: set[str] = set()

    @classmethod
    def start(cls) -> "Compilers":
        """Starts them in a separate process group, so that Ctrl-C does not reach them and all can be killed at once."""
        words = command("octavo.worker.compile_process", "main", os.getpid())
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            return cls(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, process_group=0))
        except OSError as error:
            logger.debug("No process to compile kernels in: %r", error)
            return cls()

    def compile(self, wanted: Wanted) -> None:
        """Starts the compilation, and returns at once."""
        self._request = json.dumps(asdict(wanted))
        if self._process is None or self._process.stdin is None:
            return
        try:
            os.write(self._process.stdin.fileno(), self._request.encode() + b"\n")
        except OSError as error:  # the process has died
            logger.debug("Kernels are not compiled ahead: %r", error)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """A context in which the first call of a kernel waits until it is compiled. Every kernel must be called before the context ends."""
        from triton import knobs

        mark = self._mark()
        if mark.exists():
            self.close()
        if self._process is not None:
            self._wait_for(DRIVER)
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = self._before_compiling
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def close(self) -> None:
        """Kills the processes, in any state."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # closes the pipes, and waits
            self._process = None

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _mark(self) -> Path:
        """Returns a marker file in Triton's cache. If it exists, all wanted kernels were compiled before, and nothing is waited for."""
        from triton import knobs
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.runtime.cache import triton_key

        from octavo.worker.kernel_calls import kernel_keys

        decides = [self._request, sys.version, triton_key(), str(sorted(get_cache_invalidating_env_vars().items())), *kernel_keys()]
        return Path(knobs.cache.dir) / f"octavo-{hashlib.sha256(' '.join(decides).encode()).hexdigest()}"

    def _before_compiling(self, *, key: str, fn: Any, **_: Any) -> None:
        if self._process is not None:
            self._wait_for(variant(fn, key))

    def _wait_for(self, name: str) -> None:
        """Waits until a kernel is in the cache, or will certainly not be compiled."""
        watch = Stopwatch()
        while (self._known is None or name in self._coming) and self._hear():
            pass
        self.seconds_waited += watch.total()
        if name not in (self._known or ()):
            logger.debug("Not compiled ahead: %s", name)

    def _hear(self) -> bool:
        """Reads one line. Returns False if no more will follow."""
        assert self._process is not None and self._process.stdout is not None
        word, _, rest = self._process.stdout.readline().rstrip("\n").partition(" ")
        if word == SEEN:
            self._known = set(rest.split())
            self._coming = set(self._known)
        elif word in (DONE, FAILED):
            name, _, why = rest.partition(" ")
            self._coming.discard(name)
            if word == FAILED:
                logger.debug("Compiling ahead failed: %s: %s", name, why)
        else:  # the process has ended
            self._known, self._coming = self._known or set(), set()
        return bool(word)
