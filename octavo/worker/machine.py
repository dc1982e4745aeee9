"""What this process may use of the machine: memory and CPUs, cgroup limits counted, and what the CPU is fast at."""

import math
import os
from pathlib import Path

from octavo.config import thread_limit

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
CPU_INFO = Path("/proc/cpuinfo")


def memory_bytes() -> int:
    """Memory the process may use: the machine's, or its cgroup's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read_number(group / "memory.max") for group in _groups()]
    limits.append(_read_number(CGROUP / "memory/memory.limit_in_bytes"))  # cgroup v1
    return min([total, *(limit for limit in limits if limit)])


def num_threads() -> int:
    """CPUs in the affinity mask, within the cgroup's quota and OMP_NUM_THREADS."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, _cgroup_cpus() or cpus, thread_limit() or cpus))


def cpu_flags() -> frozenset[str]:
    """What the CPU has and the kernel lets us use, in the kernel's words."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def fast_dtype() -> str:
    """bfloat16 where the CPU multiplies it natively, else float32. Asked without torch, which a plan does not wait for."""
    return "bfloat16" if cpu_flags() & {"avx512_bf16", "amx_tile"} else "float32"


def resolve_dtype(asked: str, stored: str | None) -> str:
    """`auto`: float32 checkpoints stay float32, all others take what this CPU is fast at."""
    if asked != "auto":
        return asked
    return "float32" if stored == "float32" else fast_dtype()


def _groups() -> list[Path]:
    """This process's cgroup and all above it (v2): each may set a limit, and all of them hold."""
    try:
        own = next((line[3:] for line in OWN_GROUP.read_text().splitlines() if line.startswith("0::")), "")
    except OSError:
        own = ""
    parts = [part for part in own.split("/") if part]
    return [CGROUP.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _cgroup_cpus() -> int | None:
    quotas = [quota for group in _groups() if (quota := _read_quota(group / "cpu.max")) is not None]
    return min(quotas, default=None)


def _read_quota(path: Path) -> int | None:
    try:
        quota, period = path.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return None  # no such limit, or "max"


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
