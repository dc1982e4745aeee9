"""Models through the real door, many in one process: `octavo generate --model MODEL x`, measured one by one.

    python -m tests.support.doors SOUND      one JSON [model, flags, as_root] per line in, one JSON `Outcome` per line out

SOUND is a model that opens, tried first: it imports what is imported once. What the
command and the libraries under it write to stderr is caught at the file descriptor, so that nothing is missed. A model that
hangs ends the process after `MAX_SECONDS` of CPU time, or after `PATIENCE` by the clock; whoever started it sees the answer missing.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_SECONDS = 5
PATIENCE = 120
NOBODY = 65534


@dataclass
class Outcome:
    code: int
    stderr: str
    seconds: float  # of CPU time
    peak_mb: float  # above what the process held before


def try_model(model: str, flags: Sequence[str], as_root: bool) -> Outcome:
    """Without `as_root`, a process of root is nobody for a while: root may read everything."""
    from octavo.cli.main import main

    before = _peak_mb(reset=True)
    with tempfile.TemporaryFile() as caught, _stderr_into(caught.fileno()), _user(as_root):
        start = time.process_time()
        code = main(["generate", "--model", model, "x", *flags])
        seconds = time.process_time() - start
        peak = _peak_mb() - before
        caught.seek(0)
        return Outcome(code, caught.read().decode(errors="replace"), seconds, peak)


def _peak_mb(reset: bool = False) -> float:
    """The most memory held so far, or since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


@contextmanager
def _stderr_into(descriptor: int) -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _user(as_root: bool) -> Iterator[None]:
    if as_root or os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try_model(sys.argv[1], ["--kv-cache-memory-bytes", "65536"], as_root=True)
    for line in sys.stdin:
        signal.alarm(PATIENCE)
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        print(json.dumps(asdict(try_model(*json.loads(line)))), file=answers, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


if __name__ == "__main__":
    _serve()
