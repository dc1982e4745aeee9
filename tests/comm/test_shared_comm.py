"""Ranks in processes of their own: they sum and gather exactly, whoever is slow, and nobody waits for one that does not come."""

import gc
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from octavo.comm.comm import Comm
from octavo.comm.shared_memory import SharedMemoryComm
from octavo.errors import ConfigError
from octavo.kernels.cpu import library as native
from tests.support.rank_processes import Ranks, joined_shapes

ROUNDS = 500
LIMIT = 1.0  # seconds that ranks wait, where one does not come
LATE = 1.5  # what may be added to that on a busy machine


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_sum_in_rank_order_and_all_that_was_shown(size: int) -> None:
    with Ranks(size, "tests.support.rank_processes:exchanges", {"rounds": ROUNDS, "seed": size}) as ranks:
        assert ranks.results() == [{"right": ROUNDS}] * size


def test_gathers_join_the_last_dimension_and_sums_take_any_strides() -> None:
    with Ranks(2, "tests.support.rank_processes:shapes", slot_bytes=64) as ranks:
        assert ranks.results() == joined_shapes()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.timed("how soon a lost rank is reported")
def test_a_rank_that_was_killed_or_stopped_is_named_to_all_others_in_time(name: str, size: int) -> None:
    with Ranks(size, "tests.support.rank_processes:until_the_end", {"late": None}, seconds=LIMIT) as ranks:
        assert [ranks.line(rank) for rank in range(size)] == ["joined"] * size
        time.sleep(0.2)
        ranks.processes[1].send_signal(getattr(signal, name))
        for rank in {*range(size)} - {1}:
            result = ranks.line(rank)
            assert result["error"] == "rank 1 did not answer for 1 s"
            assert 0.5 * LIMIT < result["seconds"] < LIMIT + LATE
        ranks.processes[1].send_signal(signal.SIGCONT)
        if name == "SIGSTOP":
            assert "rank 1 did not answer" in ranks.line(1)["error"]


@pytest.mark.timed("how soon waiting ranks end")
def test_a_rank_that_gives_up_ends_all_waiting_at_once() -> None:
    with Ranks(3, "tests.support.rank_processes:until_the_end", {"late": 0}, seconds=60) as ranks:
        assert [ranks.line(rank) for rank in range(3)] == ["joined"] * 3
        assert ranks.line(0) == "late"
        time.sleep(0.5)
        started = time.monotonic()
        ranks.comm.abort()
        assert [ranks.line(rank)["error"] for rank in (1, 2)] == [f"rank 0 gave up, so rank {rank} cannot go on" for rank in (1, 2)]
        assert time.monotonic() - started < LATE
        ranks.go(0)
        assert "rank 0 gave up" in ranks.line(0)["error"]


@pytest.mark.timed("how soon a lost rank is reported after a pause")
def test_a_pause_of_all_ranks_takes_nothing_from_the_time_limit() -> None:
    with Ranks(2, "tests.support.rank_processes:until_the_end", {"late": 0}, seconds=LIMIT) as ranks:
        assert [ranks.line(rank) for rank in range(2)] == ["joined"] * 2
        assert ranks.line(0) == "late"
        for process in ranks.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(LIMIT + LATE + 1)
        ranks.processes[1].send_signal(signal.SIGCONT)  # what waits looks first
        time.sleep(0.1)
        ranks.processes[0].send_signal(signal.SIGCONT)
        ranks.go(0)
        time.sleep(0.3)
        ranks.processes[0].kill()  # they had gone on: it is this that ends them
        assert ranks.line(1)["seconds"] < LIMIT + LATE


def test_killed_ranks_leave_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    with Ranks(2, "tests.support.rank_processes:until_the_end", {"late": None}) as ranks:
        assert [ranks.line(rank) for rank in range(2)] == ["joined"] * 2
        assert "octavo-ranks (deleted)" in Path("/proc/self/maps").read_text()
        for process in ranks.processes:
            process.kill()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "octavo" in name}
    del ranks
    gc.collect()  # groups of other tests
    assert "octavo-ranks" not in Path("/proc/self/maps").read_text()


def test_without_files_in_memory_a_nameless_file_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fd = SharedMemoryComm.create(1, 64)
    comm: Comm = SharedMemoryComm.join(fd, 0, 1, 1)
    os.close(fd)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(comm.all_reduce(torch.arange(99.0)), torch.arange(99.0))


def test_what_ranks_cannot_do_is_said() -> None:
    fd = SharedMemoryComm.create(1, 64)
    comm = SharedMemoryComm.join(fd, 0, 1, 1)
    os.close(fd)
    with pytest.raises(ValueError, match=re.escape("not torch.int64")):
        comm.all_reduce(torch.ones(3, dtype=torch.int64))


def test_without_the_library_it_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PATH", Path("/nowhere/liboctavo.so"))
    native.find_library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"ranks of one host communicate through the native library: liboctavo.so was not built"):
            SharedMemoryComm.create(2)
    finally:
        native.find_library.cache_clear()


@pytest.mark.soak
def test_how_long_a_sum_takes() -> None:
    with Ranks(2, "tests.support.rank_processes:speed", {"counts": [576, 4096]}, slot_bytes=1 << 18) as ranks:
        medians = ranks.results()[0]
    print("microseconds of a sum over two ranks, by floats:", medians)
    assert list(medians) == ["576", "4096"]
