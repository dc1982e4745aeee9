"""Where the Triton kernels run: compiled on a GPU, where they are marked `gpu`; in Triton's interpreter where that was asked for
before anything imported triton (`tests/kernels/test_triton.py` does); else not at all, since they have nothing to run on.

In the interpreter types differ in nothing but their rounding. So cases of float16 are left to the long run there, and those of bfloat16
that float32 has as well. Every other combination of a test's values is left to it, too, unless the test has one list of two values.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ParameterSet = type(pytest.param())
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
            if INTERPRETED and (re.search(r"(?<!b)float16", item.name) or (twin != item.nodeid and twin in names) or _is_odd(item)):
                item.add_marker("soak")


def _is_odd(item: pytest.Item) -> bool:
    """Whether the places of its values in their lists have an odd sum."""
    marks = list(item.iter_markers("parametrize"))
    is_one_of_two = len(marks) == 1 and len(marks[0].args[1]) == 2
    return not is_one_of_two and sum(_place(mark, item.callspec.params) for mark in marks) % 2 == 1  # type: ignore[attr-defined]


def _place(mark: pytest.Mark, values: dict[str, Any]) -> int:
    """Of a test's values in a list of its own; pytest numbers combinations alone."""
    names, cases = mark.args
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    for place, case in enumerate(cases):
        case = case.values if isinstance(case, ParameterSet) else (case,) if len(names) == 1 else case
        if all(values[name] is value for name, value in zip(names, case)):
            return place
    raise AssertionError(f"{values} is none of {cases}")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if ON_GPU else "cpu"
