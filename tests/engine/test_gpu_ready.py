"""On a GPU: once an engine is ready, whatever it is asked for, Triton compiles and loads nothing more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_nothing_is_compiled_after_ready() -> None:
    command = [sys.executable, "bench/gpu_ready.py", "--model", "tiny", "--rounds", "0", "--check"]
    said = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[-1].split() == ["compiled", "after", "ready:", "0"]
