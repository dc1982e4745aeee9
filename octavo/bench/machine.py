"""`Machine` says what a benchmark ran on, for figures mean little without it. `peak_memory` says how much memory it took."""

import platform
import resource
from dataclasses import dataclass

import torch

from octavo import __version__
from octavo.config import EngineConfig
from octavo.model_config import ModelConfig
from octavo.worker.device import device_here, level_used
from octavo.worker.machine import OWN_STATUS, cpu_model, num_threads, proc_bytes, resolve_dtype


@dataclass(frozen=True, slots=True)
class Machine:
    model: str
    dtype: str
    gpu: str | None  # None if the CPU computes
    cpu: str
    threads: int
    system: str
    python: str
    torch: str
    octavo: str

    def __str__(self) -> str:
        gpu = f"{self.gpu}; " if self.gpu else ""
        return (
            f"{self.model}, {self.dtype}; {gpu}{self.cpu}, {self.threads} thread{'s' if self.threads > 1 else ''}; "
            f"octavo {self.octavo}, torch {self.torch}, Python {self.python}, {self.system}"
        )


def describe(config: EngineConfig, name: str, model: ModelConfig) -> Machine:
    """Returns this machine, as the model would use it."""
    choice = device_here(config.device)
    return Machine(
        model=name,
        dtype=resolve_dtype(config.dtype, model.dtype, choice.device, level_used(config)),
        gpu=choice.gpu.name if choice.gpu else None,
        cpu=cpu_model(),
        threads=num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        octavo=__version__,
    )


def peak_memory() -> int:
    """Returns the most bytes that this process has held at once.

    Linux's own count is preferred, because the count of getrusage begins with what the parent process had.
    """
    unit = 1 if platform.system() == "Darwin" else 1024
    return proc_bytes(OWN_STATUS, "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
