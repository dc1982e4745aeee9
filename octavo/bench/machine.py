"""On what a benchmark ran: the line without which its figures mean little, and the memory it took."""

import platform
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo import __version__
from octavo.config import EngineConfig
from octavo.model_config import ModelConfig
from octavo.worker.machine import num_threads, resolve_dtype


@dataclass(frozen=True, slots=True)
class Machine:
    model: str
    dtype: str
    cpu: str
    threads: int
    system: str
    python: str
    torch: str
    octavo: str

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.dtype}; {self.cpu}, {self.threads} thread{'s' if self.threads > 1 else ''}; "
            f"octavo {self.octavo}, torch {self.torch}, Python {self.python}, {self.system}"
        )


def describe(config: EngineConfig, name: str, model: ModelConfig) -> Machine:
    return Machine(
        model=name,
        dtype=resolve_dtype(config.dtype, model.dtype),
        cpu=_cpu_name(),
        threads=num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        octavo=__version__,
    )


def peak_memory() -> int:
    """Most bytes this process held at once. Linux's own count first: that of getrusage begins with the parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
