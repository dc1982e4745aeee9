"""What this process may use of the machine: memory and CPUs, cgroup limits counted, and what the CPU is fast at."""

import math
import os
from pathlib import Path

import torch

from octavo.config import thread_limit

CGROUP = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Memory the process may use: the machine's, or its cgroup's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read_number(CGROUP / "memory.max"), _read_number(CGROUP / "memory/memory.limit_in_bytes")]
    return min([total, *(limit for limit in limits if limit)])


def num_threads() -> int:
    """CPUs in the affinity mask, within the cgroup's quota and OMP_NUM_THREADS."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, _cgroup_cpus() or cpus, thread_limit() or cpus))


def fast_dtype() -> str:
    """bfloat16 where the CPU multiplies it natively, else float32."""
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "float32"


def _cgroup_cpus() -> int | None:
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return None  # no cgroup v2, or "max"


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
