"""The native library under test: the package's own, or the one TEST_NATIVE_LIBRARY names (`make sanitize` builds such)."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from octavo.kernels.cpu import library as native
from octavo.kernels.cpu import packing
from octavo.kernels.cpu.library import NativeLibrary
from octavo.kernels.cpu.packing import Floats

if "TEST_NATIVE_LIBRARY" in os.environ:
    native.PATH = Path(os.environ["TEST_NATIVE_LIBRARY"])
    packing.LEAST = sys.maxsize  # a sanitizer watches what was allocated alone


def the_library() -> NativeLibrary:
    """Where it is missing, whatever wanted it fails and says why."""
    found = native.find_library()
    assert isinstance(found, NativeLibrary), found
    return found


def levels_here() -> tuple[str, ...]:
    return the_library().levels


@contextmanager
def running(level: str, threads: int = 1) -> Iterator[NativeLibrary]:
    library = the_library()
    library.set_level(level)
    library.set_threads(threads)
    assert (library.level, library.threads) == (level, threads)
    yield library


def error(got: Floats, expected: Floats) -> float:
    """The largest difference, relative to the largest number expected; NaN where there is one."""
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())
