"""A file of cases for `tests/native/driver.cpp`: inputs of one kernel each, and what has to come out.

Lines of text; a line that announces an array is followed by its bytes (little-endian, row by row) and a newline:

    octavo cases 1                          the first line
    case KERNEL TITLE                       the kernel is a word, the title is the rest of the line
    number NAME VALUE                       a shape, a kind, an epsilon
    array NAME DTYPE SHAPE                  f4 u1 i1 i4 i8, f2 (float16) or u2 (bfloat16); 3x4
    expect RESULT FORM MEASURE TOLERANCE LEVELS DTYPE SHAPE
    end

FORM is the arithmetic by which the result was made. A result passes that is near enough to one of those expected; LEVELS
("any", or names with commas between) are those that may compute in this form. MEASURE says how far off a result is:

    exact      bits are equal, or both are NaN
    largest    the largest difference, relative to the largest number expected
    each       the largest difference, each relative to its own number

Where NaN is expected, anything that is not finite will do.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

FIRST_LINE = b"octavo cases 1\n"


@dataclass(frozen=True)
class Expected:
    result: str
    form: str
    values: NDArray[Any]
    measure: str = "exact"
    tolerance: float = 0.0
    levels: tuple[str, ...] = ()  # empty: any

    def header(self) -> str:
        levels = ",".join(self.levels) or "any"
        return f"expect {self.result} {self.form} {self.measure} {self.tolerance!r} {levels} {_kind_of(self.values)}"


@dataclass
class Case:
    kernel: str
    title: str
    numbers: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any] | None] = field(default_factory=dict)  # None: not there
    expected: list[Expected] = field(default_factory=list)

    def parts(self) -> Iterable[bytes]:
        yield f"case {self.kernel} {self.title}\n".encode()
        for name, value in self.numbers.items():
            yield f"number {name} {value!r}\n".encode()
        for name, array in self.arrays.items():
            if array is not None:
                yield f"array {name} {_kind_of(array)}\n".encode() + array.tobytes() + b"\n"
        for each in self.expected:
            yield f"{each.header()}\n".encode() + each.values.tobytes() + b"\n"
        yield b"end\n"


def write_cases(path: Path, cases: Iterable[Case]) -> int:
    """How many were written."""
    count = 0
    with path.open("wb") as file:
        file.write(FIRST_LINE)
        for case in cases:
            file.writelines(case.parts())
            count += 1
    return count


def _kind_of(array: NDArray[Any]) -> str:
    assert array.dtype.str[1:] in ("f4", "f2", "u2", "u1", "i1", "i4", "i8"), array.dtype
    return f"{array.dtype.str[1:]} {'x'.join(map(str, array.shape))}"
