"""The process of `Nursery`. A line [command, folder, out, err] on stdin makes a child run that command of Python; its code is the answer.

It has imported what takes long and is no part of Octavo, and must have nothing of Octavo: every child finds its own in its folder.
An example that fails is not made smaller: nobody reads it.
"""

import json
import os
import runpy
import signal
import sys

import _pytest.pathlib
import hypothesis.internal.conjecture.engine
import numpy
import pytest
import torch
import transformers.generation
import transformers.modeling_utils
from hypothesis import Phase, settings

IMPORTED = hypothesis, numpy, pytest, torch, transformers, _pytest


def child(command: list[str], folder: str, out: str, err: str, seconds: int) -> None:
    signal.alarm(seconds)
    for name, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    as_module = command[0] == "-m"
    sys.argv = command[1:] if as_module else command
    sys.path.insert(0, folder)
    code: object = 0
    try:
        if as_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.join(folder, os.path.dirname(command[0])))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main(seconds: int) -> None:
    assert not any(name.partition(".")[0] in ("octavo", "tests") for name in sys.modules)
    settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.reuse, Phase.generate])
    settings.load_profile("unshrunk")  # which those of tests/conftest.py are made from
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            child(*json.loads(line), seconds)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
