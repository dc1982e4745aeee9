"""The native library, loaded by ctypes: the structs and functions of `octavo/native/octavo.h`.

    find_library()    the library of this package, or why there is none: not built, not loadable here, or from another build

The library has no handle: its level, its threads and its buffers belong to the process. So it serves one
caller at a time: threads that call it take turns. A forked child must not call it (threads do not survive a fork).
"""

import ctypes
import functools
import sys
from ctypes import c_int
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.cpu.header import HEADER

PATH = Path(__file__).parents[2] / "native" / ("liboctavo.dylib" if sys.platform == "darwin" else "liboctavo.so")
CONSTANTS = HEADER.constants
PANEL, K_PAD = CONSTANTS["PANEL"], CONSTANTS["K_PAD"]
F32, BF16, Q8, Q4, F16 = (CONSTANTS[name] for name in ("F32", "BF16", "Q8", "Q4", "F16"))  # formats of weights and, except Q4, of caches
ACTIVATIONS = {name: CONSTANTS[name.upper()] for name in ("swiglu", "geglu", "clamped", "gelu")}
NORMS = {name: CONSTANTS[f"{name.upper()}_NORM"] for name in ("rms", "layer")}
NO_MEMORY = -(2**31)  # result of functions that need buffers


class Matrix(ctypes.Structure):
    _fields_ = HEADER.fields("Matrix")


class Norm(ctypes.Structure):
    _fields_ = HEADER.fields("Norm")


class Mixture(ctypes.Structure):
    _fields_ = HEADER.fields("Mixture", Matrix)


class Layer(ctypes.Structure):
    _fields_ = HEADER.fields("Layer", Matrix, Norm, Mixture)


class Group(ctypes.Structure):
    _fields_ = HEADER.fields("Group")


class Model(ctypes.Structure):
    _fields_ = HEADER.fields("Model", Matrix, Norm, Layer, Group)


class Step(ctypes.Structure):
    _fields_ = HEADER.fields("Step")


class Draws(ctypes.Structure):
    _fields_ = HEADER.fields("Draws")


class Ranking(ctypes.Structure):
    _fields_ = HEADER.fields("Ranking")


STRUCTS = (Matrix, Norm, Mixture, Layer, Group, Model, Step, Draws, Ranking)


class NativeLibrary:
    """`library.call.octavo_matmul(...)` is the function of that name; ctypes checks its arguments."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded, AttributeError or ValueError if it is from another build."""
        self.path = path
        self.call = ctypes.CDLL(str(path))
        for name, (result, arguments) in HEADER.functions(*STRUCTS).items():
            function = getattr(self.call, name)
            function.restype, function.argtypes = result, arguments
            if result is c_int:
                function.errcheck = _checked
        there = np.zeros(len(STRUCTS), np.int64)
        self.call.octavo_struct_sizes(address(there))
        for struct, size in zip(STRUCTS, there.tolist()):
            if size != ctypes.sizeof(struct):
                raise ValueError(f"{struct.__name__} has {size} bytes there and {ctypes.sizeof(struct)} here")

    @functools.cached_property
    def levels(self) -> tuple[str, ...]:
        """The levels that this machine supports and the compiler of the library could build, in ascending order."""
        return tuple(self.call.octavo_level_name(level).decode() for level in range(self.call.octavo_cpu_level() + 1))

    @property
    def level(self) -> str:
        return self.levels[int(self.call.octavo_level())]

    def set_level(self, level: str) -> None:
        self.call.octavo_set_level(self.levels.index(level))

    @property
    def threads(self) -> int:
        return int(self.call.octavo_threads())

    def set_threads(self, threads: int) -> None:
        """Starts and stops workers; the caller is one of the threads."""
        self.call.octavo_set_threads(threads)


def _checked(code: int, function: object, arguments: object) -> int:
    """Raises MemoryError if a call had no memory for its buffers. Other results are for the caller."""
    if code == NO_MEMORY:
        raise MemoryError("there is no memory for the buffers of the native kernels")
    return code


def address(array: NDArray[np.generic] | None) -> int | None:
    """Returns the address of an array. The caller must keep the array alive."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous")
    return array.ctypes.data


@functools.cache
def find_library() -> NativeLibrary | str:
    """Returns the library of this package, or a message with the reason why it cannot be used and what helps."""
    again = "run `make native` in a clone, or install the package again"
    if not PATH.exists():
        return f"{PATH.name} was not built: with a C++20 compiler there (g++ 11 or newer), {again}"
    try:
        return NativeLibrary(PATH)
    except OSError as error:
        return f"{PATH.name} cannot be loaded here ({error}): {again}"
    except (AttributeError, ValueError) as error:
        return f"{PATH.name} is from another build than this package ({error}): {again}"
