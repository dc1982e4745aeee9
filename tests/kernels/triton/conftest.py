"""Where the Triton kernels run: compiled on a GPU, where they are marked `gpu`; in Triton's interpreter where that was asked for
before anything imported triton (`tests/kernels/test_triton.py` does); else not at all, since they have nothing to run on.

In the interpreter types differ in nothing but their rounding. So cases of float16 are left to the long run there, and those of bfloat16
that float32 has as well.
"""

import os
import re
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
if INTERPRETED:
    from tests.support.interpreter import mend

    mend()
elif not ON_GPU:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {item.nodeid for item in items}
    for item in items:
        if item.path.parent == Path(__file__).parent:
            # numpy, in the interpreter, warns of numbers that overflow as they should
            item.add_marker("gpu" if ON_GPU else pytest.mark.filterwarnings("ignore::RuntimeWarning"))
            twin = item.nodeid.replace("bfloat16", "float32")
            if INTERPRETED and (re.search(r"(?<!b)float16", item.name) or (twin != item.nodeid and twin in names)):
                item.add_marker("soak")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if ON_GPU else "cpu"
