"""Children of Python that need not import torch, the libraries of a server and Octavo once more: `forked([sys.executable, "-m", ...])`.

A process that has imported all of it is forked for each of them. It is then as if it had been started by `subprocess.Popen`: a child of
the test's own process, with its arguments, folder, environment and pipes. What is tried is what comes after the imports; tests of how a
process starts, what it imports and what it takes until then start real ones. `/proc/PID/comm` has the name of the module it runs.

`python -P tests/support/forked.py FD` is that process: it reads from the socket FD what to run.
"""

import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
IMPORTED = (
    *("octavo", "torch", "numpy.random", "safetensors", "tokenizers", "jinja2", "msgspec", "zmq", "rich", "uvloop", "httptools"),
    *("prometheus_client", "llguidance", "octavo.llm", "octavo.server.run", "octavo.engine.process", "octavo.worker.build"),
    *("octavo.worker.rank_process", "octavo.attention.cpu", "octavo.models.dense", "octavo.cli.main", "octavo.cli.serve"),
    "octavo.cli.generate",
)
HIGH = 500  # descriptors from here on are nobody's
MOST_BYTES = 1 << 17
_starting = threading.Lock()


class Nursery:
    """A process that is forked, a child of this one; it ends with it."""

    def __init__(self, asks: socket.socket, process: "subprocess.Popen[bytes] | None" = None) -> None:
        """`process`: it, if it is not a copy of this one; kept, for Python warns of one that nobody waits for"""
        self._socket, self._process = asks, process

    def start(self, request: dict[str, Any], fds: list[int]) -> int:
        """The pid of a child of ours: whoever forked it has ended, so it falls to this process, while it asks for such."""
        prctl = ctypes.CDLL(None).prctl
        with _starting:
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
                return int(self._socket.recv(100))
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@cache
def nursery() -> Nursery:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", __file__, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL)
    theirs.close()
    return Nursery(ours, process)


def forked(command: list[str], *, forks_children: bool = False, place: Nursery | None = None, **settings: Any) -> "subprocess.Popen[Any]":
    """`subprocess.Popen` with these settings. What Python itself is told by its environment wants a process of its own.

    `forks_children`: a server, whose engines and siblings are forked, too. `place`: what is forked, if it is not a process of this one
    """
    env = settings.get("env", os.environ)
    told = {name for name, value in env.items() if name.startswith("PYTHON") and value != os.environ.get(name)}
    if command[0] != sys.executable or told - {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}:
        return subprocess.Popen(command, **settings)
    return _Forked(command, place or nursery(), forks_children, **settings)


class ForkingSubprocess:
    """In the place of `subprocess`, in a module that starts children of Python."""

    def __init__(self, place: Nursery | None = None) -> None:
        self.Popen = partial(forked, place=place)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def fork_children_of(monkeypatch: Any, *modules: str) -> None:
    """Those that these modules start, from here to the end of a test."""
    for name in modules:
        with suppress(ModuleNotFoundError):  # a machine with a GPU may lack what a server needs: tests marked gpu do without
            monkeypatch.setattr(importlib.import_module(name), "subprocess", ForkingSubprocess())


def run_forked(command: list[str], input: Any, timeout: float, **settings: Any) -> "subprocess.CompletedProcess[Any]":
    """`subprocess.run` with captured output."""
    pipe = subprocess.PIPE
    with forked(command, stdin=pipe, stdout=pipe, stderr=pipe, **settings) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    def __init__(self, command: list[str], place: Nursery, forks_children: bool, **settings: Any) -> None:
        assert settings.keys() <= {"cwd", "env", "stdin", "stdout", "stderr", "text", "pass_fds", "bufsize", "process_group"}, settings
        self._nursery, self._forks_children = place, forks_children
        super().__init__(command, **settings)

    def _execute_child(self, args: Any, executable: Any, preexec: Any, close: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any) -> None:
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[3:9]
        given = {0: p2cread, 1: c2pwrite, 2: errwrite, **{fd: fd for fd in pass_fds}}
        given = {target: target if fd == -1 else fd for target, fd in given.items()}
        request = {"words": args[1:], "cwd": str(cwd or os.getcwd()), "env": dict(os.environ if env is None else env), "fds": list(given)}
        request |= {"parent": os.getpid(), "leads": rest[-1] == 0, "forks_children": self._forks_children}
        self.pid = self._nursery.start(request, list(given.values()))
        self._child_created = True
        pipes = {(p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)}  # its end, our end; a file that was given has none
        ends = {theirs for theirs, ours in pipes if ours != -1} | ({self._devnull} if hasattr(self, "_devnull") else set())
        for fd in ends - {-1}:
            os.close(fd)
        self._closed_child_pipe_fds = True


# -- in the process that is forked


def _become(request: dict[str, Any], fds: list[int]) -> Callable[[], None]:
    """This process becomes what was asked for; what is returned is its program."""
    while os.getppid() != request["parent"]:  # it looks after its parent, and may end with it
        time.sleep(0.001)
    high = [_moved(fd) for fd in fds]
    for fd, target in zip(high, request["fds"], strict=True):
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    _open_standard_files()
    is_safe = request["words"][0] == "-P"
    first, *words = request["words"][is_safe:]
    here = {"-m": os.getcwd(), "-c": ""}.get(first, os.path.dirname(first))
    sys.path[:0] = [*([] if is_safe else [here]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if request["forks_children"]:
        children = ForkingSubprocess(_fork_here())
        for parent in ("octavo.engine.supervisor", "octavo.server.siblings"):
            importlib.import_module(parent).subprocess = children  # type: ignore[attr-defined]
    named = {"-m": r"[\w.]+", "-c": r"(?<=from )[\w.]+"}.get(first)  # the module that is run, or the first that is imported
    if named and (module := re.search(named, words[0])):
        ctypes.CDLL(None).prctl(PR_SET_NAME, module[0].encode(), 0, 0, 0)  # its first 15 characters
    if first == "-m":
        sys.argv = list(words)
        return lambda: runpy.run_module(words[0], run_name="__main__", alter_sys=True) and None
    if first == "-c":
        sys.argv = ["-c", *words[1:]]
        return _Text(words[0]).run
    sys.argv = [first, *words]
    return lambda: runpy.run_path(first, run_name="__main__") and None


def _fork_here() -> Nursery:
    """A copy of this process as it is now, to be forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return Nursery(ours)
    ours.close()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # whoever reads what this process writes is not to wait for its copy
        os.dup2(null, fd)
    program = _serve(theirs)
    if program is None:
        os._exit(0)
    program()
    sys.exit()


class _Text(InspectLoader):
    """What follows `python -c`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text

    def run(self) -> None:
        spec = ModuleSpec("__main__", self)
        sys.modules["__main__"] = module = module_from_spec(spec)
        self.exec_module(module)


def _moved(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH)
    os.close(fd)
    return moved


def _open_standard_files() -> None:
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for name, fd, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        lines, at_once = fd == 2 or os.isatty(fd), bool(os.environ.get("PYTHONUNBUFFERED"))
        file: Any = open(fd, "wb", buffering=0 if at_once else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, io.TextIOWrapper(file, "utf-8", errors, line_buffering=lines, write_through=at_once))
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def _serve(asked: socket.socket) -> Callable[[], None] | None:
    """Forks twice for every request, so that the child is nobody's here. In the child, it returns what is to be run."""
    while True:
        data, fds, _, _ = socket.recv_fds(asked, MOST_BYTES, 16)
        if not data:
            return None
        told, tell = os.pipe()
        middle = os.fork()
        if not middle:
            request = json.loads(data)
            child = os.fork()
            if child:
                if request["leads"]:
                    os.setpgid(child, child)
                os.write(tell, str(child).encode())
                os._exit(0)
            for fd in (asked.detach(), told, tell):
                os.close(fd)
            return _become(request, fds)
        os.waitpid(middle, 0)
        asked.send(os.read(told, 100))
        for fd in (*fds, told, tell):
            os.close(fd)


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    for name in IMPORTED:
        with suppress(ModuleNotFoundError):  # a machine with a GPU may lack what a server needs
            importlib.import_module(name)
    sys.path.remove(ROOT)
    gc.freeze()  # what was imported stays as it is, and is not looked through when a child ends
    program = _serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        program()
