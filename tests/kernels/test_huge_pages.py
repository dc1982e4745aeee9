"""Memory of packed weights."""

from pathlib import Path

import pytest

from octavo.kernels.cpu import packing
from octavo.kernels.cpu.packing import LEAST, LINE, lines


def mapping_at(place: int) -> dict[str, str]:
    """Returns what the kernel tells of the mapping at an address: nothing where nothing is mapped."""
    found, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            start, end = (int(number, 16) for number in head.split("-"))
            inside = start <= place < end
        elif inside:
            found[head.rstrip(":")] = rest.strip()
    return found


@pytest.fixture(autouse=True)
def own_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_chunk", packing._Chunk())


def test_arrays_begin_on_lines_and_none_overlaps_another() -> None:
    sizes = [1, LEAST - 1, LEAST, LEAST + 1, 3 * LEAST + 7, packing._CHUNK + 1, LEAST]
    arrays = [lines(size) for size in sizes]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % LINE == 0 and array.size == sizes[number]
        array[:1], array[-1:] = number, number
    assert all(array[0] == array[-1] == number for number, array in enumerate(arrays))


def test_large_arrays_share_huge_pages_that_go_with_the_last_of_them() -> None:
    first, second = lines(LEAST), lines(LEAST)
    assert second.ctypes.data - first.ctypes.data == LEAST
    first[:], place = 1, first.ctypes.data
    assert "hg" in mapping_at(place)["VmFlags"].split()
    del first
    assert mapping_at(place), "the second still lies there"
    del second
    assert not mapping_at(place)
