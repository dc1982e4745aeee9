"""The library is there, is what the header says, and its levels are tried before they are trusted."""

import ctypes
import itertools
import logging
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from octavo import layout
from octavo.config import CpuIsa
from octavo.errors import ConfigError
from octavo.kernels.cpu import levels
from octavo.kernels.cpu import library as native
from octavo.kernels.cpu.levels import Sample, open_native, use_best_level
from octavo.kernels.cpu.library import (
    F32,
    K_PAD,
    PANEL,
    STRUCTS,
    Draws,
    Header,
    Layer,
    Matrix,
    Mixture,
    Model,
    NativeLibrary,
    Ranking,
    Step,
    address,
    find_library,
)
from octavo.kernels.cpu.packing import pack_float
from octavo.worker.machine import cpu_flags
from tests.support.native import levels_here, running, the_library


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "octavo")  # another test may have left it quieter
    levels._say_once.cache_clear()
    return caplog


@pytest.fixture
def finding_again() -> Iterator[None]:
    """What is found is kept for the process: tests that plant something else look again, before and after."""
    find_library.cache_clear()
    yield
    find_library.cache_clear()


def test_the_library_is_there_and_offers_what_the_cpu_has() -> None:
    flags = cpu_flags()
    wanted = {
        "x86_64": {"avx2": {"avx2", "f16c"}, "avx512": {"avx512_vnni"}, "avx512bf16": {"avx512_bf16"}, "amx": {"amx_bf16", "amx_int8"}},
        "aarch64": {"neon": {"asimddp", "asimdhp"}, "i8mm": {"i8mm", "bf16"}},
    }[platform.machine()]  # fmt: skip
    offered = list(itertools.takewhile(lambda level: wanted[level] <= flags, wanted))
    assert not isinstance(find_library(), str)
    assert the_library().levels == ("portable", *offered)


DECLARED = """
enum { OCTAVO_SEVEN = 7, OCTAVO_NINE = 9 };  // and 11 things that are not
typedef struct {
    int32_t first, *second;     // int32_t missing;
    const Inner *third; Inner fourth;
    const Other *fifth;
    float sixth;
} Outer;
// int octavo_absent(int level);
const char *octavo_name(int level);
void octavo_all(void);
int64_t octavo_some(const Outer *outer, const float *const *x, float eps,
                    int64_t rows);  // a comment (with brackets);
"""


class Inner(ctypes.Structure):
    _fields_ = (("only", ctypes.c_int32),)


def test_a_header_is_read_as_a_compiler_reads_it() -> None:
    header, pointer = Header(DECLARED), ctypes.c_void_p
    assert header.constants == {"SEVEN": 7, "NINE": 9}
    expected = {"first": ctypes.c_int32, "second": pointer, "third": ctypes.POINTER(Inner), "fourth": Inner, "fifth": pointer}
    assert dict(header.fields("Outer", Inner)) == expected | {"sixth": ctypes.c_float}
    assert header.functions(Inner) == {
        "octavo_name": (ctypes.c_char_p, [ctypes.c_int]),
        "octavo_all": (None, []),
        "octavo_some": (ctypes.c_int64, [pointer, pointer, ctypes.c_float, ctypes.c_int64]),
    }


@pytest.mark.parametrize(
    "field, wrong",
    [("double x;", "the type double"), ("Inner x;", "the type Inner"), ("long int x;", "a field 'int x'"), ("float x[4];", "a field 'x")],
)
def test_what_no_class_of_ctypes_is_known_for_is_an_error(field: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Header(f"typedef struct {{ int32_t good; {field} }} Outer;").fields("Outer")


def test_plans_and_kernels_have_the_same_panels() -> None:
    assert (PANEL, K_PAD) == (layout.PANEL, layout.K_PAD)


def test_a_call_that_finds_no_memory_for_its_buffers_is_an_error_and_the_next_one_works() -> None:
    x = np.ones((2, 64), np.float32)
    packed = pack_float(the_library(), x, F32)
    matrix, y = packed.struct, np.zeros((2, 2), np.float32)
    wide, many, most = Matrix(kind=F32, n=16, k=2**20), 2**40, 2**31 - 1
    layers = (Layer * 1)(Layer(qkv=wide, output=wide, gate_up=wide, down=wide))
    model, step = Model(num_layers=1, hidden=64, layers=layers, head=wide), Step(num_tokens=most, num_rows=1)
    with running(levels_here()[-1]) as library:
        call = library.call
        calls = (
            lambda: call.octavo_matmul(matrix, None, None, many, many),
            lambda: call.octavo_gate_up(matrix, 0, None, None, many, many),
            lambda: call.octavo_mix(Mixture(count=1, chosen=1, router=matrix), 0, None, None, many),
            lambda: call.octavo_draw(Draws(rows=1, vocab=many)),
            lambda: call.octavo_rank(Ranking(rows=1, vocab=many)),
            lambda: call.octavo_step(model, step),
        )
        for attempt in calls:
            with pytest.raises(MemoryError, match="buffers of the native kernels"):
                attempt()
        call.octavo_matmul(matrix, address(x), address(y), 2, 2)
    assert (y == 64).all()


@pytest.mark.usefixtures("finding_again")
@pytest.mark.parametrize("trouble", ["not built", "no library", "another library", "other structs"])
def test_without_a_usable_library_the_reason_and_what_helps_are_said_once(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    class LongerMatrix(ctypes.Structure):
        _fields_ = [*Matrix._fields_, ("more", ctypes.c_int64)]

    if trouble == "not built":
        monkeypatch.setattr(native, "PATH", tmp_path / "liboctavo.so")
        reason = "liboctavo.so was not built: with a C++20 compiler there (g++ 11 or newer), run"
    elif trouble == "no library":
        monkeypatch.setattr(native, "PATH", tmp_path / "liboctavo.so")
        (tmp_path / "liboctavo.so").write_text("not a library")
        reason = "cannot be loaded here"
    elif trouble == "another library":
        monkeypatch.setattr(native, "PATH", Path(np._core._multiarray_umath.__file__))
        reason = "octavo_level_name): "
    else:
        monkeypatch.setattr(native, "STRUCTS", (LongerMatrix, *STRUCTS[1:]))
        reason = "is from another build than this package (LongerMatrix has 80 bytes there and 88 here): "

    assert open_native("auto", 1) is None and open_native("auto", 1) is None
    (line,) = [record.getMessage() for record in warnings.records]
    assert reason in line and "torch computes alone" in line and "make native" in line
    assert line.endswith(str(find_library()))


@pytest.mark.parametrize("asked", get_args(CpuIsa))
def test_a_level_is_taken_as_asked_where_the_machine_has_it(asked: str, warnings: pytest.LogCaptureFixture) -> None:
    here = levels_here()
    if asked not in ("auto", *here):
        with pytest.raises(ConfigError, match=f"cpu_isa is {asked}, this machine offers {', '.join(here)} "):
            open_native(asked, 1)
        return
    library = open_native(asked, 2)
    assert isinstance(library, NativeLibrary)
    assert library.level == (here[-1] if asked == "auto" else asked)
    assert library.threads == 2
    assert warnings.records == []


def test_where_the_portable_level_is_all_there_is_torch_computes_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(the_library(), "levels", ("portable",))
    assert open_native("auto", 1) is None
    (line,) = [record.getMessage() for record in warnings.records]
    assert "torch computes alone: this CPU runs their portable level only (cpu_isa portable takes that)" in line
    library = open_native("portable", 1)
    assert library is not None and library.level == "portable"


class Broken:
    """A library whose samples are off at some levels."""

    levels = ("portable", "some", "more", "most")

    def __init__(self, bad: tuple[str, ...], kernel: str) -> None:
        self.bad, self.kernel, self.level = bad, kernel, ""

    def set_level(self, level: str) -> None:
        self.level = level

    def samples(self) -> list[Sample]:
        return [self._spoiled(s) if self.level in self.bad and s.kernel == self.kernel else s for s in SAMPLES]

    @staticmethod
    def _spoiled(sample: Sample) -> Sample:
        return sample._replace(result=sample.result + 2 * sample.tolerance * np.abs(sample.result).max())


SAMPLES = levels.sample_results(the_library())


@pytest.mark.parametrize("bad", [bad for size in range(4) for bad in itertools.combinations(Broken.levels[1:], size)], ids="+".join)
def test_a_broken_level_is_dropped_for_the_next_with_a_warning_that_names_the_kernel(
    bad: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(levels, "sample_results", Broken.samples)
    for kernel in dict.fromkeys(sample.kernel for sample in SAMPLES):
        for wanted in Broken.levels:
            warnings.clear()
            library = Broken(bad, kernel)
            use_best_level(library, wanted)
            tried = Broken.levels[1 : Broken.levels.index(wanted) + 1]
            good = [level for level in ("portable", *tried) if level not in bad]
            assert library.level == good[-1]
            dropped = [level for level in reversed(tried) if Broken.levels.index(level) > Broken.levels.index(good[-1])]
            reason = f"is not used: its {kernel} differs from the portable kernel's; please report it"
            assert [record.getMessage() for record in warnings.records] == [f"CPU level {level} {reason}" for level in dropped]


def test_a_result_that_is_not_a_number_is_a_difference_too() -> None:
    spoiled = [sample._replace(result=np.full_like(sample.result, np.nan)) for sample in SAMPLES]
    assert levels.first_difference(SAMPLES, SAMPLES) is None
    assert levels.first_difference(SAMPLES, SAMPLES[:-1] + spoiled[-1:]) == SAMPLES[-1].kernel


def test_samples_are_neither_zero_nor_wild() -> None:
    """A sample that is all zeros, or one huge number among small ones, would let anything pass."""
    for sample in SAMPLES:
        size = np.abs(sample.result[sample.result != 0])
        assert len(size) > 0.03 * sample.result.size and np.median(size) > np.abs(sample.result).max() / 100, sample.kernel
