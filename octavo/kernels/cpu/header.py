"""Reads `octavo/native/octavo.h` for ctypes: the constants, the fields of each struct, and the types of each function.

The header is the only description of the C ABI. It uses few kinds of declarations, and anything else is an error:

    enum { NAME = number, ... };    typedef struct { type name, *name; ... } Name;    type name(type name, ...);

A pointer is a `c_void_p`, unless it points to one of the structs that the caller names.
"""

import ctypes
import re
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

CType = Any  # a class of ctypes, or None for void
SCALARS: dict[str, CType] = {"int": c_int, "int32_t": c_int32, "int64_t": c_int64, "float": c_float, "void": None}
DECLARATION = re.compile(r"(?:const )?(\w+)\b(.*)", re.DOTALL)


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
