"""What the process may use: the machine's, the cgroup's, the affinity mask's and the user's limits, whichever is lowest."""

import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from octavo.config import CpuIsa, EngineConfig
from octavo.errors import ConfigError
from octavo.worker import machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


# promise: environment-omp-num, threads-cpus-affinity
@pytest.mark.parametrize(
    ("quota", "asked", "threads"),
    [(None, "", 8), ("max 100000", "", 8), ("250000 100000", "", 3), ("50000 100000", "", 1), ("9900000 100000", "", 8),
     ("400000 100000", "2", 2), (None, "64", 8), (None, "0", 8), (None, "many", 8), ("nonsense", "", 8)],
)  # fmt: skip
def test_threads_are_within_affinity_quota_and_wish(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, asked: str, threads: int
) -> None:
    if quota is not None:
        (cgroup / "cpu.max").write_text(quota + "\n")
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert machine.num_threads() == threads


# promise: cpu-pool-quarter
def test_memory_is_the_lowest_limit(cgroup: Path) -> None:
    whole = machine.memory_bytes()
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (cgroup / "memory.max").write_text("max\n")
    assert machine.memory_bytes() == whole
    (cgroup / "memory.max").write_text("1073741824\n")
    assert machine.memory_bytes() == 2**30
    (cgroup / "memory").mkdir()
    (cgroup / "memory" / "memory.limit_in_bytes").write_text("536870912\n")
    assert machine.memory_bytes() == 2**29
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")  # no limit, in the old words
    assert machine.memory_bytes() == 2**30


# promise: limits-cgroup-below
def test_limits_of_every_group_above_count(cgroup: Path) -> None:
    (cgroup / "own").write_text("1:name=old:/elsewhere\n0::/user.slice/octavo.service\n")
    inner = cgroup / "user.slice" / "octavo.service"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{2**28}\n")
    (inner / "cpu.max").write_text("300000 100000\n")
    (inner.parent / "cpu.max").write_text("500000 100000\n")
    assert machine.memory_bytes() == 2**28
    assert machine.num_threads() == 3


# promise: limits-cgroup-below
def test_limits_of_old_cgroups_count_in_the_tree_of_their_controller(cgroup: Path) -> None:
    (cgroup / "own").write_text("7:memory:/box/inner\n3:cpu,cpuacct:/box\n0::/\n")
    for place, limit in (("memory/box/inner/memory.limit_in_bytes", 2**40), ("memory/box/memory.limit_in_bytes", 2**28)):
        (cgroup / place).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / place).write_text(f"{limit}\n")
    (cgroup / "cpu" / "box").mkdir(parents=True)
    for place, quota in (("cpu", -1), ("cpu/box", 250000)):
        (cgroup / place / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (cgroup / place / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.memory_bytes() == 2**28
    assert (machine.quota_cpus(), machine.num_threads()) == (3, 3)


def test_memory_at_hand_and_the_cpu_are_read_from_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    assert (machine.available_bytes(), machine.cpu_flags()) == (None, frozenset()) and machine.cpu_model()
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    2048 kB\n")
    (tmp_path / "cpuinfo").write_text("model name\t: First: one\nflags\t: avx2 avx512f\n\nmodel name\t: Second\nflags\t: avx2\n")
    assert (machine.available_bytes(), machine.cpu_model(), machine.cpu_flags()) == (2**21, "First: one", {"avx2", "avx512f"})
    (tmp_path / "cpuinfo").write_text("Features\t: asimd sve\n")
    assert machine.cpu_flags() == {"asimd", "sve"}
def test_torch_is_fast_at_what_it_says_and_at_float32_where_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert machine.fast_dtype(None) == ("bfloat16" if native else "float32")
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    assert machine.fast_dtype(None) == "float32"
    for flags, dtype in (("fpu avx512_bf16 sse", "bfloat16"), ("amx_tile", "bfloat16"), ("avx512f amx_tiles", "float32")):
        machine.CPU_INFO.write_text(f"processor : 0\nflags\t\t: {flags}\nflags\t\t: {flags}\n")
        assert machine.fast_dtype(None) == dtype


def test_every_level_of_the_native_kernels_has_a_type_that_it_is_fast_at() -> None:
    assert set(machine.LEVEL_DTYPES) == set(get_args(CpuIsa)) - {"auto"}
    assert machine.resolve_dtype("auto", "bfloat16", "cpu", "neon") == machine.resolve_dtype("auto", None, "cpu", "avx2") == "float16"
    assert machine.resolve_dtype("auto", "float16", "cpu", "i8mm") == machine.resolve_dtype("auto", None, "cpu", "amx") == "bfloat16"
    assert machine.resolve_dtype("auto", "float32", "cpu", "neon") == machine.resolve_dtype("auto", None, "cpu", "portable") == "float32"


@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype"])
def test_float16_is_refused_where_torch_computes_on_a_cpu(name: str) -> None:
    config = replace(EngineConfig(), **{name: "float16"})
    with pytest.raises(ConfigError, match=f"{name} is float16.*torch computes here: set {name} to bfloat16 or float32"):
        machine.refuse_float16(config, "cpu", None)
    machine.refuse_float16(config, "cpu", "portable")
    machine.refuse_float16(config, "cuda", None)


def test_a_gpu_takes_the_type_of_the_file_and_bfloat16_where_it_has_another() -> None:
    stored = ["float32", "float16", "bfloat16", "float64", None]
    taken = ["float32", "float16", "bfloat16", "bfloat16", "bfloat16"]
    assert [machine.resolve_dtype("auto", one, "cuda", None) for one in stored] == taken
    assert machine.resolve_dtype("float16", "float32", "cuda", None) == "float16"
    assert [machine.resolve_dtype("auto", one, "cpu", None) for one in stored[:2]] == ["float32", machine.fast_dtype(None)]


def fake_nodes(folder: Path, lists: list[str]) -> None:
    for number, text in enumerate(lists):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(text + "\n")


# promise: ranks-numa-nodes
@pytest.mark.parametrize(
    "lists",
    [["0-7"], ["0-3,8-11", "4-7,12-15"], ["0-1", "2-7", "8-10"], ["0-3", "", "4-7"], [f"{4 * node}-{4 * node + 3}" for node in range(12)]],
    ids=["one node", "two with hyperthreads", "of different sizes", "one without CPUs", "more than ten"],
)
def test_ranks_share_cpus_node_by_node(lists: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "NODES", tmp_path)
    fake_nodes(tmp_path, lists)
    node_of = {cpu: number for number, text in enumerate(lists) for cpu in machine._listed(text)}
    cpus = sorted(node_of)
    for allowed in (cpus, cpus[1:], cpus[::2]):
        nodes = {node_of[cpu] for cpu in allowed}
        for size in range(1, len(allowed) + 1):
            shares = [machine.share_of_cpus(rank, size, allowed) for rank in range(size)]
            assert all(shares) and sorted(cpu for share in shares for cpu in share) == allowed, "all CPUs, none twice"
            on = [sorted({node_of[cpu] for cpu in share}) for share in shares]
            assert on == sorted(on), "neighbours are near each other"
            if size >= len(nodes):
                assert all(len(each) == 1 for each in on)
                for node in nodes:
                    counts = [len(share) for share, each in zip(shares, on) if each == [node]]
                    assert max(counts) - min(counts) <= 1, "ranks of a node share evenly"
            else:
                assert sorted(node for each in on for node in each) == sorted(nodes), "whole nodes"
        crowd = [machine.share_of_cpus(rank, len(allowed) + 3, allowed) for rank in range(len(allowed) + 3)]
        assert [cpu for share in crowd for cpu in share] == [*allowed, *allowed, *allowed][: len(allowed) + 3]


def test_a_machine_that_does_not_tell_its_nodes_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "NODES", tmp_path)
    assert machine.numa_nodes([0, 1, 5]) == [[0, 1, 5]]
    fake_nodes(tmp_path, ["0-1"])
    assert machine.numa_nodes([0, 1, 5]) == [[0, 1, 5]], "5 is nowhere"
    assert machine.numa_nodes([1]) == [[1]] and machine.cpu_list([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert [*machine._listed("0-2,5,7-8")] == [0, 1, 2, 5, 7, 8]
