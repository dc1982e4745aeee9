"""Detects the memory and CPUs that this process may use, within cgroup limits, and the fastest dtypes of the CPU.

It must work even if torch cannot be imported, because `octavo doctor` uses it.
"""

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from octavo.config import EngineConfig, thread_limit
from octavo.errors import ConfigError

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
CPU_INFO = Path("/proc/cpuinfo")
MEMORY_INFO = Path("/proc/meminfo")
OWN_STATUS = Path("/proc/self/status")
NODES = Path("/sys/devices/system/node")
Item = TypeVar("Item")

# The fastest dtype of each level of the native kernels. On levels that do not multiply bfloat16, float16 needs as little memory, is
# converted to float32 by one instruction and rounds less.
LEVEL_DTYPES = {
    "portable": "float32", "avx2": "float16", "avx512": "float16", "avx512bf16": "bfloat16", "amx": "bfloat16",
    "neon": "float16", "i8mm": "bfloat16",
}  # fmt: skip


def total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_bytes() -> int:
    """Returns the bytes that the process may use: those of the machine, or its cgroup's limit if that is lower."""
    limits = [read_number(group / name) for group in groups("memory") for name in ("memory.max", "memory.limit_in_bytes")]
    return min([total_bytes(), *(limit for limit in limits if limit)])


def available_bytes() -> int | None:
    """Returns the bytes that no process on this machine uses, or None if the system does not report it."""
    return proc_bytes(MEMORY_INFO, "MemAvailable")


def num_threads() -> int:
    """Returns how many CPUs this process may use, at most OMP_NUM_THREADS."""
    return max(1, min(num_cpus(), thread_limit() or num_cpus()))


def num_cpus() -> int:
    """Returns the number of CPUs in the affinity mask, at most the cgroup's quota."""
    cpus = len(allowed_cpus())
    return min(cpus, quota_cpus() or cpus)


def share_of_cpus(rank: int, size: int, cpus: list[int]) -> list[int]:
    """Returns the CPUs of one of several ranks: adjacent ones, and not those of another rank unless there are more ranks than CPUs.

    Ranks are assigned node by node. No rank spans two nodes, unless there are fewer ranks than nodes: then each has whole nodes.
    """
    if size > len(cpus):
        return [cpus[rank % len(cpus)]]
    nodes = numa_nodes(cpus)
    if size < len(nodes):
        return [cpu for node in _share(rank, size, nodes) for cpu in node]
    first = 0
    for node, ranks in zip(nodes, _ranks_of(nodes, size)):
        if rank < first + ranks:
            return _share(rank - first, ranks, node)
        first += ranks
    raise AssertionError(f"rank {rank} of {size}")


def _share(place: int, size: int, items: list[Item]) -> list[Item]:
    return items[place * len(items) // size : (place + 1) * len(items) // size]


def _ranks_of(nodes: list[list[int]], size: int) -> list[int]:
    """Returns how many ranks each node has: one, and each further rank goes to the node where it gets the most CPUs."""
    ranks = [1] * len(nodes)
    for _ in range(size - len(nodes)):
        ranks[max(range(len(nodes)), key=lambda node: len(nodes[node]) / (ranks[node] + 1))] += 1
    return ranks


def numa_nodes(cpus: list[int]) -> list[list[int]]:
    """Returns these CPUs grouped by NUMA node, or as a single node if the system does not report nodes."""
    try:
        paths = sorted(NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
        found = [set(_listed(path.read_text())) for path in paths]
    except (OSError, ValueError):
        return [cpus]
    nodes = [node for one in found if (node := [cpu for cpu in cpus if cpu in one])]
    return nodes if sum(map(len, nodes)) == len(cpus) else [cpus]


def _listed(text: str) -> Iterator[int]:
    """Yields the numbers of a list such as 0-3,8."""
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)


def cpu_list(cpus: list[int]) -> str:
    """Returns CPUs in the system's list format: 0-3,8."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def keep_to(cpus: list[int]) -> None:
    """Binds this thread, and those it will start, to these CPUs, if the system supports that.

    A rank calls this before it loads anything. The system allocates memory on the node of the CPU that first writes to it, so the weights
    and the cache of a rank are close to its CPUs without a memory policy.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def allowed_cpus() -> list[int]:
    """Returns the CPUs in the affinity mask."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def quota_cpus() -> int | None:
    """Returns the CPUs of the cgroup's quota, rounded up, or None without a quota."""
    quotas = [quota for group in groups("cpu") if (quota := _read_quota(group)) is not None]
    return min(quotas, default=None)


def cpu_model() -> str:
    return _fields(CPU_INFO).get("model name") or platform.processor() or platform.machine()


def this_machine() -> str:
    return f"{cpu_model()}; {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def cpu_flags() -> frozenset[str]:
    """Returns the CPU features that the kernel reports, by the kernel's names."""
    found = _fields(CPU_INFO)
    return frozenset((found.get("flags") or found.get("Features") or "").split())  # x86 or ARM


def fast_dtype(level: str | None) -> str:
    """Returns the dtype in which the native kernels are fastest on this level, or torch without a level. It does not import torch."""
    if level is not None:
        return LEVEL_DTYPES[level]
    return "bfloat16" if cpu_flags() & {"avx512_bf16", "amx_tile"} else "float32"


def resolve_dtype(requested: str, stored: str | None, device: str, level: str | None) -> str:
    """Returns the dtype of the run. With `auto`, float32 checkpoints stay float32, and all others use the fastest dtype of this CPU; a GPU
    is fast in either 16-bit type. `level`: of the native kernels, if they compute"""
    if requested != "auto":
        return requested
    if device == "cuda":
        return stored if stored in ("float32", "float16") else "bfloat16"
    return "float32" if stored == "float32" else fast_dtype(level)


def refuse_float16(config: EngineConfig, device: str, level: str | None) -> None:
    """Refuses float16 for torch on a CPU: it is slow there, and large numbers overflow to infinity."""
    for name, value in (("dtype", config.dtype), ("kv_cache_dtype", config.kv_cache_dtype)):
        if value == "float16" and device == "cpu" and level is None:
            raise ConfigError(
                f"{name} is float16, which on a CPU only the native kernels support; torch computes here: "
                f"set {name} to bfloat16 or float32"
            )


def groups(controller: str) -> list[Path]:
    """Returns this process's cgroup and all its ancestors. All their limits apply. v1 has one tree per controller."""
    own = {"": "/", controller: "/"}
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        own |= {name: path for name in names.split(",") if name in own}
    trees = {name: [part for part in path.split("/") if part] for name, path in own.items()}
    return [CGROUP.joinpath(name, *parts[:depth]) for name, parts in trees.items() for depth in range(len(parts) + 1)]


def _read_quota(group: Path) -> int | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no limit, or "max"
        quota_us, period_us = read_number(group / "cpu.cfs_quota_us"), read_number(group / "cpu.cfs_period_us")
        return math.ceil(quota_us / period_us) if quota_us and period_us and quota_us > 0 else None  # -1: none


def read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def proc_bytes(path: Path, name: str) -> int | None:
    """Returns the bytes of a line `name:  123 kB`, or None if there is no such line, as on other systems."""
    found = _fields(path).get(name, "").removesuffix(" kB")
    return int(found) * 1024 if found.isdigit() else None


def _fields(path: Path) -> dict[str, str]:
    """Returns the first `name : value` for each name in a file of /proc."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
