"""Octavo as a user starts it: a process with pipes (tests/support/forked.py), or one behind a terminal that the test types into."""

import contextlib
import fcntl
import io
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType

from octavo.cli.main import main
from tests.support.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120  # a busy machine starts torch slowly
# The default model's tokenizer and template, but no weights: starts fast, talks nonsense. Without the warning that says so.
FAKE = {"OCTAVO_DEBUG": "runner=fake", "OCTAVO_LOG_LEVEL": "ERROR"}
SLOW = FAKE | {"OCTAVO_DEBUG": "runner=fake,forward.sleep=5"}  # 4,000 tokens take 20 s: they are interrupted in time


def environment(extra: dict[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_") and key != "NO_COLOR"}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "dumb", **extra}


def octavo(*words: str, stdin: str = "", cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command with modules of its own (PYTHONPATH) imports everything itself."""
    command, given = [sys.executable, "-m", "octavo", *words], environment(env or {})
    if "PYTHONPATH" in (env or {}):
        return subprocess.run(command, input=stdin, cwd=cwd, env=given, capture_output=True, text=True, timeout=SECONDS)
    return run_forked(command, stdin, SECONDS, cwd=cwd, env=given, text=True)


def octavo_here(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The same command in this process, which has imported what a new one would have to: for what is refused before an engine starts."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except SystemExit as end:
                code = int(end.code or 0)
    finally:
        sys.stdin = before
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


class TimedOut(AssertionError):
    """What was expected did not come."""


class Typist:
    """`octavo WORDS` at a terminal. `expect` waits for a pattern and gives all that came before its end."""

    def __init__(self, *words: str, cwd: Path, env: dict[str, str]) -> None:
        self._master, slave = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=environment(env),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        os.close(slave)
        self.transcript = ""
        self._unread = ""

    def __enter__(self) -> "Typist":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str, seconds: float = SECONDS) -> str:
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self._unread)) is None:
            if not select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimedOut(f"no {pattern!r} in time after {self.transcript[-2000:]!r}")
            self._take()
        before, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return before

    def ask(self, text: str) -> str:
        """Type a line, wait for the next prompt; what was printed between."""
        self.type(text + "\r")
        return self.expect(r">>> \Z").partition("\n")[2].removesuffix(">>> ")

    def ask_twice(self) -> str:
        """A question whose answer is six tokens long, and the same again, whose prompt is then cached; /stats after the first."""
        assert self.ask("Good morning to the whole house, and to everybody in it").strip()
        first = self.ask("/stats")
        assert re.search(r"answer  6 tokens in \d+\.\d\d s: first after \d+\.\d\d s, [\d.]+ tokens/s", first)
        assert re.search(r"prompt  \d\d tokens, 0 of them cached \(cold\)", first)
        assert self.ask("/retry").strip()
        assert re.search(r"prompt  \d\d tokens, (16|32) of them cached", self.ask("/stats"))
        return first

    def interrupt(self) -> str:
        """Ctrl-C until the prompt is back: one that comes just before the terminal is read stays unseen until the next key."""
        time.sleep(0.2)  # nobody's fingers are quicker, and the terminal is read again after the last key
        for _ in range(SECONDS // 10):
            self.type("\x03")
            with contextlib.suppress(TimedOut):
                return self.expect(r">>> \Z", seconds=10)
        raise TimedOut(f"no prompt after Ctrl-C: {self.transcript[-2000:]!r}")

    def leave(self, typed: str = "\x04") -> int:
        self.type(typed)
        return self.process.wait(SECONDS)

    def _take(self) -> None:
        try:
            text = os.read(self._master, 65536).decode(errors="replace")
        except OSError as error:  # the process has left, and its terminal with it
            raise AssertionError(f"it ended: {self.transcript[-2000:]!r}") from error
        self.transcript += text
        self._unread += text
