"""What `make cross` rests on: the driver passes what is right, fails what is not and names it, and missing tools are told in one line.

The driver is built for this machine here, and runs a case or two of each kernel; `.ci/cross` runs them all where they are emulated.
"""

import os
import shutil
import subprocess
import zipfile
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest

from tests.support import cross_cases
from tests.support.case_file import Case, Expected, write_cases
from tests.support.native import levels_here, the_library
from tests.support.wheel_machine import LIBRARY, what_is_wrong

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("product", "gate_up", "mixture", "norm", "attend", "write", "delta_net", "latent", "step", "argmax", "draw", "rank", "noise")


@cache
def some_of_each() -> dict[str, Case]:
    """The last of the first few: those of more than one row, block or token."""
    rooms = (
        islice(cross_cases.product_cases(), 12),
        islice(cross_cases.mixture_cases(), 3),
        cross_cases.norm_cases(),
        islice(cross_cases.attention_cases(), 8),
        islice(cross_cases.delta_net_cases(), 4),
        islice(cross_cases.latent_cases(), 1),
        islice(cross_cases.step_cases(), 2),
        islice(cross_cases.argmax_cases(), 42),
        islice(cross_cases.sampling_cases(), 6),
        [*cross_cases.sampling_cases()][-1:],
    )
    found = {case.kernel: case for case in chain(*rooms)}
    assert set(found) == set(KERNELS)
    return found


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, library = tmp_path_factory.mktemp("driver") / "driver", the_library().path
    compiler = next(found for name in ("c++", "g++", "clang++") if (found := shutil.which(name)))
    parts = ["-std=c++20", "-Wall", "-Wextra", "-Wno-unused-function", "-Werror", str(ROOT / "tests/native/driver.cpp"), "-o", str(made)]
    link = [str(library), f"-Wl,-rpath,{library.parent}", "-Wl,--allow-shlib-undefined"]
    quiet = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's, meant for the driver alone
    run = subprocess.run([compiler, *parts, *link], env=quiet, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return made


def run(driver: Path, path: Path) -> tuple[int, list[str]]:
    done = subprocess.run([str(driver), str(path)], capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def spoiled(expected: Expected) -> Expected:
    """One number as a mistake would leave it: by twice the tolerance, or another id."""
    values = expected.values.copy()
    place = np.unravel_index(np.nanargmax(np.abs(np.nan_to_num(values.astype(np.float64), neginf=0, posinf=0))), values.shape)
    if values.dtype == np.uint16:
        values[place] ^= 0x4000  # bfloat16: another exponent
    elif expected.measure == "exact" or values.dtype.kind in "iu":
        values[place] -= max(1, int(3 * expected.tolerance * abs(float(values[place]))))
    else:
        values[place] *= 1 - 2 * max(expected.tolerance, 1e-6)
    return replace(expected, values=values)


def test_what_the_twins_give_passes_on_every_level(driver: Path, tmp_path: Path) -> None:
    write_cases(tmp_path / "cases", some_of_each().values())
    code, lines = run(driver, tmp_path / "cases")
    assert code == 0, lines
    assert lines[-1].endswith(" passed, 0 failed") and int(lines[-1].split()[0]) >= 2 * len(KERNELS) * len(levels_here())
    assert lines[0].startswith("built: portable") and lines[0].endswith(f"; this machine runs up to {levels_here()[-1]}")
    assert {line.split(": ")[0] for line in lines[1:-1]} == set(levels_here())


# promise: linux-aarch64-native
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_result_that_is_off_fails_and_is_named(kernel: str, driver: Path, tmp_path: Path) -> None:
    case = some_of_each()[kernel]
    for result in dict.fromkeys(each.result for each in case.expected):
        wrong = replace(case, expected=[spoiled(each) if each.result == result else each for each in case.expected])
        beside = [other for name, other in some_of_each().items() if name in ("norm", "noise") and name != kernel]
        write_cases(tmp_path / "cases", [wrong, *beside])
        code, lines = run(driver, tmp_path / "cases")
        failed = [line for line in lines if line.startswith("FAILED")]
        assert code == 1 and failed, result
        assert all(f": {kernel} {case.title}" in line and f": {result} in " in line and "is off by" in line for line in failed), failed
        assert lines[-1].split()[1::2] == ["passed,", "failed"] and int(lines[-1].split()[2]) == len(failed)


def test_what_is_finite_must_not_be_where_a_number_was_not_and_the_reverse(driver: Path, tmp_path: Path) -> None:
    good = some_of_each()["norm"]
    wanted_nan = replace(good, expected=[replace(each, values=each.values * np.float32(np.nan)) for each in good.expected])
    stream = good.arrays["stream"]
    assert stream is not None
    has_nan = replace(good, arrays=good.arrays | {"stream": stream * np.float32(np.nan)})
    for case in (wanted_nan, has_nan):
        write_cases(tmp_path / "cases", [case])
        code, lines = run(driver, tmp_path / "cases")
        assert code == 1 and "is off by inf" in lines[1]


@pytest.mark.parametrize(
    "trouble, said",
    [
        ("empty", "there are no cases in it"), ("cut", "the file ends within"), ("other", "is no file of cases"),
        ("kernel", "no kernel is called rune"), ("result", "nothing gives z"), ("level", "no y is expected at level portable"),
    ],
)  # fmt: skip
def test_a_file_that_proves_nothing_is_refused(trouble: str, said: str, driver: Path, tmp_path: Path) -> None:
    norm, path = some_of_each()["norm"], tmp_path / "cases"
    cases = {
        "kernel": replace(norm, kernel="rune"),
        "result": replace(norm, expected=[replace(norm.expected[1], result="z")]),
        "level": replace(norm, expected=[replace(norm.expected[1], levels=("rune",))]),
    }
    write_cases(path, [] if trouble == "empty" else [cases.get(trouble, norm)])
    if trouble in ("cut", "other"):
        path.write_bytes(path.read_bytes()[:-90] if trouble == "cut" else b"something else")
    code, lines = run(driver, path)
    assert code == 2 and said in lines[-1]


def test_tools_that_are_missing_are_told_in_one_line_with_their_packages(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "uname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run([str(ROOT / ".ci/cross")], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert " is missing: apt-get install qemu-user g++-" in line


# promise: linux-aarch64-native
@pytest.mark.parametrize(
    "name, head, wrong",
    [
        ("aarch64", 183, None), ("aarch64", 62, "is for x86_64, not aarch64"), ("x86_64", 183, "is not named for aarch64"),
        ("aarch64", None, "has no octavo/native/liboctavo.so"), ("aarch64", 0, "is for another machine, not aarch64"),
    ],
)  # fmt: skip
def test_a_wheel_is_for_what_its_name_and_its_library_say(name: str, head: int | None, wrong: str | None, tmp_path: Path) -> None:
    wheel = tmp_path / f"octavo-1.0-py3-none-linux_{name}.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("octavo/__init__.py", "")
        if head is not None:
            file.writestr(LIBRARY, b"\x7fELF" + bytes(14) + head.to_bytes(2, "little"))
    found = what_is_wrong(wheel, "aarch64")
    assert found is None if wrong is None else found is not None and wrong in found
