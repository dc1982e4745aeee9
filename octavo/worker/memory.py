"""Detects how much memory is available on the device: the memory the process may use, minus that of other processes.

The kernel reports the memory available to new processes; a cgroup with a limit reports the usage of its members, including file
cache, which is freed on demand. Every plan counts Python and its libraries, so that part of this process's own usage is
added back; anything else it holds, such as another model, counts as used by others. Of a GPU the process may use a share; its
context there is counted in every plan, too, and memory that torch caches counts as free. A GPU that shares the CPU's
memory has what the system and the cgroups leave: CUDA's own count of free memory does not include the file cache.
"""

import gc
import re
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from octavo.config import ResolvedConfig
from octavo.errors import ConfigError
from octavo.sizing.gpu_size import CONTEXT
from octavo.sizing.memory_plan import LIBRARIES, Memory, ModelNeeds, flag_size, plan_memory
from octavo.worker.device import torch_gpu
from octavo.worker.machine import OWN_STATUS, available_bytes, groups, memory_bytes, proc_bytes, read_number

RAN_OUT = re.compile("allocate|out of memory|ALLOC_FAILED")  # torch on either device; CUDA, Triton; cuBLAS


def memory(config: ResolvedConfig) -> Memory:
    return gpu_memory(config.gpu_memory_utilization) if config.device == "cuda" else host_memory()


def gpu_memory(utilization: float) -> Memory:
    import torch

    gpu, trouble = torch_gpu()
    if gpu is None:
        raise ConfigError(f"the memory of the GPU could not be determined: {trouble}")
    own = CONTEXT + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    total, free = gpu.total, gpu.free
    if gpu.unified:
        host = host_memory()
        total, free = min(total, host.total), host.free
    return Memory.of_gpu(total, min(free + own, total), utilization, gpu.unified)


def host_memory() -> Memory:
    total, own = memory_bytes(), min(proc_bytes(OWN_STATUS, "RssAnon") or 0, LIBRARIES)
    available = [available_bytes(), _left_of_addresses(), *map(_left_in, groups("memory"))]
    free = min([total, *(left + own for left in available if left is not None)])
    return Memory(total, others=total - free)


@contextmanager
def out_of_memory_explained(needs: ModelNeeds, config: ResolvedConfig) -> Iterator[None]:
    """Turns an out-of-memory error at start into an error with advice: a plan for three quarters of the memory.

    Objects of the failed attempt are dropped with their frames: otherwise their memory would count as used by others.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not RAN_OUT.search(str(error)):
            raise
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"memory ran out at start ({reason}): {_advice(needs, config, memory(config))}") from error


def _advice(needs: ModelNeeds, config: ResolvedConfig, now: Memory) -> str:
    failed = plan_memory(needs, config, now)
    smaller = plan_memory(needs, config, replace(now, lacking=now.free - min(now.free, failed.use.total * 3 // 4)))
    return smaller.refusal or (
        f"{failed.account}: set --kv-cache-memory-bytes to {flag_size(smaller.use.kv_cache)} or less; "
        f"the largest --max-model-len that fits is then {smaller.geometry.max_model_len}"
    )


def _left_of_addresses() -> int | None:
    """Returns the bytes that `ulimit -v` leaves. It also counts memory that is only reserved."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    held = proc_bytes(OWN_STATUS, "VmSize")
    return None if limit == resource.RLIM_INFINITY or held is None else max(limit - held, 0)


def _left_in(group: Path) -> int | None:
    """Returns the bytes that the members of a cgroup may still use, or None without a limit."""
    limit, held = read_number(group / "memory.max"), read_number(group / "memory.current")
    if limit is None or held is None:
        return None
    try:
        lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        cache = sum(int(size) for name, size in lines if name in ("active_file", "inactive_file"))
    except (OSError, ValueError):
        cache = 0
    return max(limit - held + cache, 0)
