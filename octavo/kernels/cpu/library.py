"""The native library, loaded by ctypes: the structs and functions of `octavo/native/octavo.h`.

    find_library()    the library of this package, or why there is none: not built, not loadable here, or from another build

The library has no handle: its level, its threads and its buffers belong to the process. So it serves one
caller at a time: threads that call it take turns. A forked child must not call it (threads do not survive a fork).

The header is the only description of the C ABI: it is read at import. It uses few kinds of declarations, and anything else is an error:

    enum { NAME = number, ... };    typedef struct { type name, *name; ... } Name;    type name(type name, ...);
"""

import ctypes
import functools
import re
import sys
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CType = Any  # a class of ctypes, or None for void
SCALARS: dict[str, CType] = {"int": c_int, "int32_t": c_int32, "int64_t": c_int64, "float": c_float, "void": None}
DECLARATION = re.compile(r"(?:const )?(\w+)\b(.*)", re.DOTALL)

# -- the header


class Header:
    def __init__(self, text: str) -> None:
        code = re.sub(r"//[^\n]*", "", text)
        self.constants = {name: int(value) for name, value in re.findall(r"\bOCTAVO_(\w+) = (\d+)", code)}
        self._structs = {name: body for body, name in re.findall(r"typedef struct \{([^}]*)\} (\w+);", code)}
        self._functions = re.findall(r"^(\w[\w ]*?[ *])(octavo_\w+)\(([^)]*)\);", code, re.MULTILINE)

    def fields(self, name: str, *structs: type[ctypes.Structure]) -> list[tuple[str, CType]]:
        """Returns the fields of a struct, which may contain these others."""
        fields = []
        for line in filter(None, map(str.strip, self._structs[name].split(";"))):
            base, declared = _matched(line)
            fields += [(_name(one), _type(base, "*" in one, structs)) for one in declared.split(",")]
        return fields

    def functions(self, *structs: type[ctypes.Structure]) -> dict[str, tuple[CType, list[CType]]]:
        """Returns function name -> (result type, argument types)."""
        found = {}
        for result, name, arguments in self._functions:
            base, stars = _matched(result)
            declared = [] if arguments == "void" else [_matched(one.strip()) for one in arguments.split(",")]
            types = [_type(base, "*" in rest, structs) for base, rest in declared]
            found[name] = _type(base, "*" in stars, structs), types
        return found


def _matched(declaration: str) -> tuple[str, str]:
    """Returns the type and the rest of a declaration, which has the names and their stars."""
    found = DECLARATION.fullmatch(declaration)
    assert found is not None, declaration
    return found[1], found[2]


def _name(declared: str) -> str:
    name = declared.strip(" *\n")
    if not name.isidentifier():
        raise ValueError(f"octavo.h declares a field {name!r}, which is not a plain name")
    return name


def _type(base: str, pointer: bool, structs: tuple[type[ctypes.Structure], ...]) -> CType:
    struct = next((one for one in structs if one.__name__ == base), None)
    if pointer:
        return c_char_p if base == "char" else c_void_p if struct is None else POINTER(struct)
    if struct is None and base not in SCALARS:
        raise ValueError(f"octavo.h uses the type {base}, which has no class of ctypes here")
    return SCALARS[base] if struct is None else struct


HEADER = Header((Path(__file__).parents[2] / "native" / "octavo.h").read_text())


# -- the library


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


class Latent(ctypes.Structure):
    _fields_ = HEADER.fields("Latent", Matrix)


class DeltaNet(ctypes.Structure):
    _fields_ = HEADER.fields("DeltaNet", Matrix, Norm)


class Layer(ctypes.Structure):
    _fields_ = HEADER.fields("Layer", Matrix, Norm, Mixture, Latent, DeltaNet)


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


STRUCTS = (Matrix, Norm, Mixture, Latent, DeltaNet, Layer, Group, Model, Step, Draws, Ranking)


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
